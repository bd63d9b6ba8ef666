"""Configurations that cannot work are refused when the engine starts, by name."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from mooncache.errors import ConfigInvalid
from tests.sglang.package import need_sglang

need_sglang()

from mooncache.connectors.sglang import engine_passport  # noqa: E402
from mooncache.connectors.sglang.host_pools import PagePool  # noqa: E402
from tests.sglang.pools import mha_pool  # noqa: E402

Make = Callable[..., Any]


@pytest.fixture(scope="module")
def pool() -> Any:
    """A host pool that nothing is wrong with."""
    return mha_pool("page_first")


def test_a_misspelt_setting(make: Make, pool: Any) -> None:
    with pytest.raises(ConfigInvalid, match=r"Did you mean mooncache\.load_timeout_s"):
        make(pool, {"mooncache.load_timeout": 1})


def test_a_setting_that_means_nothing_here(make: Make, pool: Any) -> None:
    with pytest.raises(ConfigInvalid, match=r"There is no setting mooncache\.layerwise"):
        make(pool, {"mooncache.layerwise": True})


def test_a_value_that_is_none(make: Make, pool: Any) -> None:
    with pytest.raises(ConfigInvalid, match="load_timeout_s"):
        make(pool, {"mooncache.load_timeout_s": "soon"})


def test_the_interface_that_copies(make: Make, pool: Any) -> None:
    with pytest.raises(ConfigInvalid, match='needs "interface_v1": 1'):
        make(pool, {"interface_v1": 0})


def test_no_cluster(make: Make, pool: Any, tmp_path: Path) -> None:
    with pytest.raises(ConfigInvalid, match="mooncache up"):
        make(pool, {"mooncache.state_dir": str(tmp_path)})


def test_an_address_that_is_none(make: Make, pool: Any) -> None:
    with pytest.raises(Exception, match="nowhere"):
        make(pool, {"mooncache.master_targets": "nowhere"})


def test_another_version(make: Make, pool: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_passport.importlib.metadata, "version", lambda _: "0.4.1")
    with pytest.raises(ConfigInvalid, match=r"SGLang 0\.4\.1 is not supported"):
        make(pool)


def test_no_engine_and_no_model(make: Make, pool: Any) -> None:
    with pytest.raises(ConfigInvalid, match=r"mooncache\.model_path"):
        make(pool, {"mooncache.model_path": ""})


def test_a_model_that_is_not_here(make: Make, pool: Any) -> None:
    with pytest.raises(ConfigInvalid, match="neither a folder"):
        make(pool, {"mooncache.model_path": "no/such-model"})


def test_a_model_that_takes_images(make: Make, pool: Any, model_dir: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(model_dir, tmp_path / "media")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "vision_config": {}}))
    with pytest.raises(ConfigInvalid, match="vision_config"):
        make(pool, {"mooncache.model_path": str(folder)})


def test_decode_context_parallel(make: Make, pool: Any) -> None:
    with pytest.raises(ConfigInvalid, match="--dcp-size"):
        make(pool, is_mla_model=True, tp_size=2, dcp_size=2, logical_page_size=16)


def test_a_number_of_shards_that_cuts_heads(make: Make) -> None:
    with pytest.raises(ConfigInvalid, match=r"tp_lcm_size .* 4 KV heads .* 3 parts"):
        make(mha_pool("page_head"), tp_lcm_size=3, should_split_heads=True)


def fake_pool(**more: Any) -> Any:
    buffer = torch.zeros(96, 8, dtype=torch.uint8)
    values = {"page_size": 8, "size": 96, "dtype": torch.uint8, "kv_buffer": buffer, "layout": "page_first"}
    return SimpleNamespace(**{**values, **more})


def test_a_page_size_that_does_not_divide() -> None:
    with pytest.raises(ConfigInvalid, match="96 tokens, which its page size 7 does not divide"):
        PagePool("kv", fake_pool(page_size=7))


def test_memory_with_gaps() -> None:
    with pytest.raises(ConfigInvalid, match="not contiguous host memory"):
        PagePool("kv", fake_pool(kv_buffer=torch.zeros(96, 16, dtype=torch.uint8)[:, ::2]))


def test_memory_that_moves() -> None:
    with pytest.raises(ConfigInvalid, match="--enable-unified-memory"):
        PagePool("kv", fake_pool(shared_allocation_domain=object()))
