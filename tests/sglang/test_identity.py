"""Engines that differ in what a page's bytes mean never find each other's pages; others do."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch

from mooncache import tiny_model
from mooncache.errors import ConfigInvalid
from tests.sglang.package import need_sglang

need_sglang()

from tests.sglang.pools import hashes, indices, mha_pool, mla_pool, prompt  # noqa: E402

Make = Callable[..., Any]


@pytest.fixture
def published() -> Iterator[Callable[..., None]]:
    """Publishes settings as SGLang's scheduler process does."""
    from sglang.srt.runtime_context import get_context

    with ExitStack() as stack:
        yield lambda **fields: stack.enter_context(get_context().override_server_args(**fields))


def stored(backend: Any, name: str) -> list[str]:
    """Hashes of two pages that the backend has stored."""
    keys = hashes(prompt(2, name))
    assert backend.batch_set_v1(keys, indices([0, 1])) == [True, True]
    return keys


@pytest.mark.parametrize(
    "facts",
    [
        {"tp_rank": 1, "tp_size": 2},
        {"tp_rank": 0, "tp_size": 4},
        {"tp_rank": 0, "tp_size": 2, "pp_rank": 1, "pp_size": 2},
        {"tp_rank": 0, "tp_size": 2, "attn_cp_rank": 1, "attn_cp_size": 2},
    ],
)
def test_ranks_have_pages_of_their_own(make: Make, facts: dict[str, Any]) -> None:
    pool = mha_pool("page_first")
    first = make(pool, tp_rank=0, tp_size=2)
    keys = stored(first, f"ranks {facts}")
    assert make(pool, **facts).batch_exists(keys) == 0
    assert first.batch_exists(keys) == 2


def test_parts_of_context_parallel_ranks_of_a_latent_model_do_not_mix(make: Make) -> None:
    pool = mla_pool("page_first")
    keys = stored(make(pool, is_mla_model=True, attn_cp_rank=0, attn_cp_size=2), "cp latent")
    assert make(pool, is_mla_model=True, attn_cp_rank=1, attn_cp_size=2).batch_exists(keys) == 0


def test_types_do_not_share(make: Make) -> None:
    keys = stored(make(mha_pool("page_first")), "types")
    assert make(mha_pool("page_first", dtype=torch.bfloat16)).batch_exists(keys) == 0


def test_page_sizes_do_not_share(make: Make) -> None:
    keys = stored(make(mha_pool("page_first")), "page sizes")
    assert make(mha_pool("page_first", page=4)).batch_exists(keys) == 0


def test_models_do_not_share_whatever_they_are_called(make: Make, tmp_path: Path) -> None:
    other = tiny_model.build(tmp_path / "tiny", layers=3, seed=99)
    pool = mha_pool("page_first")
    keys = stored(make(pool, model_name="served"), "models")
    assert make(pool, {"mooncache.model_path": str(other)}, model_name="served").batch_exists(keys) == 0
    assert make(pool, model_name="another").batch_exists(keys) == 2


@pytest.mark.parametrize(
    "field",
    [{"kv_cache_dtype": "fp8_e4m3"}, {"json_model_override_args": '{"a": 1}'}, {"quantization": "fp8"}],
)
def test_settings_of_the_kv_do_not_share(make: Make, published: Any, field: dict[str, Any]) -> None:
    """Of FP8 for example the host pools are all bytes: nothing but the setting tells e4m3 from e5m2."""
    pool = mha_pool("page_first")
    published(kv_cache_dtype="fp8_e5m2")
    keys = stored(make(pool), f"settings {field}")
    published(**{"kv_cache_dtype": "fp8_e5m2", **field})
    assert make(pool).batch_exists(keys) == 0


def test_settings_of_how_it_runs_do_share(make: Make, published: Any) -> None:
    pool = mha_pool("page_first")
    published(port=1111)
    keys = stored(make(pool), "running")
    published(port=2222, disable_cuda_graph=True, max_running_requests=7, hicache_ratio=3.0)
    assert make(pool).batch_exists(keys) == 2


def test_adapters_count_by_content(make: Make, published: Any, tmp_path: Path) -> None:
    from sglang.srt.lora.lora_registry import LoRARef

    pool = mha_pool("page_first")
    keys = stored(make(pool), "adapters")
    seen = []
    for content in (b"one", b"two"):
        (tmp_path / "adapter_config.json").write_text("{}")
        (tmp_path / "adapter_model.safetensors").write_bytes(content)
        published(lora_paths=[LoRARef(lora_name="a", lora_path=str(tmp_path))])
        backend = make(pool)
        assert backend.batch_exists(keys) == 0
        seen.append(backend._names("kv", keys))
    assert seen[0] != seen[1]


def test_the_engines_own_model_is_taken(make: Make, published: Any, model_dir: Path) -> None:
    pool = mha_pool("page_first")
    keys = stored(make(pool), "own model")
    published(model_path=str(model_dir))
    assert make(pool, {"mooncache.model_path": ""})._facts.weights_digest == make(pool)._facts.weights_digest
    assert keys


@pytest.mark.parametrize("load_format", ["remote", "remote_instance"])
def test_weights_that_are_not_in_files_are_refused(make: Make, published: Any, load_format: str) -> None:
    published(load_format=load_format)
    with pytest.raises(ConfigInvalid, match=f"--load-format {load_format}"):
        make(mha_pool("page_first"))
