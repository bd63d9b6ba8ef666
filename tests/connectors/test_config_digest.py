"""The passport by allow-list: real configurations of vLLM share when nothing that matters differs, and only then."""

from __future__ import annotations

import dataclasses
import enum
from pathlib import Path
from typing import Any

import pytest

from mooncache.connectors.vllm.core.config_digest import MODEL_HARMLESS, plain, relevant

pytest.importorskip("vllm", reason="vLLM is not installed (scripts/install_vllm.sh)")
pytestmark = pytest.mark.filterwarnings("ignore")  # vLLM's own


@pytest.fixture(autouse=True)
def small_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "1")


def config(model: Path, **more: Any) -> Any:
    from vllm.engine.arg_utils import EngineArgs

    return EngineArgs(
        **{"model": str(model), "dtype": "float32", "max_model_len": 1024, **more}
    ).create_engine_config()


def digest(of: Any, folder: Path) -> str:
    from mooncache.connectors.vllm.engine_passport import read_passport

    return read_passport(of, {}, "float32", 10, folder / "state", block_tokens=32).config_digest


def test_engines_with_equal_flags_share_and_harmless_ones_do_not_matter(
    model_dir: Path, tmp_path: Path
) -> None:
    one = digest(config(model_dir), tmp_path)
    assert digest(config(model_dir), tmp_path) == one
    other = config(
        model_dir,
        max_model_len=2048,
        enforce_eager=True,
        served_model_name="other",
        seed=5,
        gpu_memory_utilization=0.5,
        max_logprobs=3,
        allowed_media_domains=["a.example"],
    )
    other.cache_config.num_gpu_blocks = 77
    assert digest(other, tmp_path) == one


@pytest.mark.parametrize("method", ["ngram", "ngram_gpu"])
def test_drafts_without_a_model_do_not_split(model_dir: Path, tmp_path: Path, method: str) -> None:
    drafting = config(
        model_dir,
        speculative_config={"method": method, "num_speculative_tokens": 3, "prompt_lookup_max": 4},
    )
    assert drafting.speculative_config.method == method
    assert digest(drafting, tmp_path) == digest(config(model_dir), tmp_path)


def test_drafts_of_a_model_split(model_dir: Path, tmp_path: Path) -> None:
    drafting = config(
        model_dir,
        speculative_config={
            "method": "draft_model",
            "model": str(model_dir),
            "num_speculative_tokens": 3,
        },
    )
    one = digest(drafting, tmp_path)
    assert one != digest(config(model_dir), tmp_path)
    drafting.speculative_config.method = "a method that is not known yet"
    assert digest(drafting, tmp_path) not in {one, digest(config(model_dir), tmp_path)}


@pytest.mark.parametrize(
    ("part", "name", "value"),
    [
        ("model_config", "quantization_config", {"linear": "fp8_per_tensor"}),
        ("model_config", "quantization_config", {"linear": "mxfp4"}),
        ("model_config", "quantization", "fp8"),
        ("model_config", "model_class_overrides", {"LlamaForCausalLM": "mine:Llama"}),
        ("model_config", "model_impl", "transformers"),
        ("model_config", "model_weights", "s3://elsewhere"),
        ("model_config", "disable_sliding_window", True),
        ("model_config", "code_revision", "main"),
        ("load_config", "model_loader_extra_config", {"tensorizer_uri": "s3://others"}),
        ("load_config", "ignore_patterns", ["*.bin"]),
        ("cache_config", "kv_cache_dtype_skip_layers", ["0"]),
        ("cache_config", "cache_dtype", "fp8"),
        ("cache_config", "kv_sharing_fast_prefill", True),
    ],
)
def test_what_may_change_the_kv_splits(
    model_dir: Path, tmp_path: Path, part: str, name: str, value: Any
) -> None:
    mine = config(model_dir)
    before = digest(mine, tmp_path)
    assert dataclasses.fields(getattr(mine, part)), "a plain configuration"
    assert name in {field.name for field in dataclasses.fields(getattr(mine, part))}
    object.__setattr__(getattr(mine, part), name, value)
    assert digest(mine, tmp_path) != before


def test_the_configuration_counts_as_vllm_understood_it(model_dir: Path, tmp_path: Path) -> None:
    """Wherever it was read from: config.json, the params.json of Mistral's format, or overrides by code."""
    mine = config(model_dir)
    before = digest(mine, tmp_path)
    mine.model_config.hf_config.rope_parameters = {"rope_theta": 5e5, "rope_type": "default"}
    assert digest(mine, tmp_path) != before

    def slower(read: Any) -> Any:
        read.rope_parameters = {"rope_theta": 7e5, "rope_type": "default"}
        return read

    by_code = digest(config(model_dir, hf_overrides=slower), tmp_path)
    assert by_code != before
    assert digest(config(model_dir, hf_overrides=slower), tmp_path) == by_code


def test_a_field_that_nobody_has_heard_of_splits(model_dir: Path) -> None:
    mine = config(model_dir).model_config
    newer = dataclasses.make_dataclass("ModelConfig", [("kv_twist", int, 0), ("seed", int, 0)])
    assert relevant(newer(), MODEL_HARMLESS) == {"kv_twist": 0}
    assert relevant(newer(1), MODEL_HARMLESS) != relevant(newer(2), MODEL_HARMLESS)
    assert not MODEL_HARMLESS - {field.name for field in dataclasses.fields(mine)}, (
        "names that vLLM does not have"
    )


def test_prefill_and_decode_as_a_worker_starts_them_share(model_dir: Path, tmp_path: Path) -> None:
    from vllm.engine.arg_utils import EngineArgs
    from vllm.entrypoints.launchers.cli_args import make_arg_parser
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    from mooncache.config import load
    from mooncache.worker.adapters.base import Launch
    from mooncache.worker.adapters.vllm import VllmAdapter

    adapter = VllmAdapter(load(env={}, overrides={"vllm.dtype": "float32", "vllm.max_model_len": 1024}))

    def started(name: str, port: int) -> str:
        launch = Launch(
            instance_id=name,
            model=str(model_dir),
            model_name="m",
            host="127.0.0.1",
            port=port,
            engine_key="k",
            passport_path=tmp_path / name,
            state_dir=tmp_path,
            events_endpoint=f"ipc://{tmp_path}/{name}",
            replay_endpoint=f"ipc://{tmp_path}/{name}-replay",
        )
        arguments = adapter.command(launch).arguments
        args = make_arg_parser(FlexibleArgumentParser()).parse_args(
            [*arguments[arguments.index("serve") + 2 :], "--model", str(model_dir)]
        )
        return digest(EngineArgs.from_cli_args(args).create_engine_config(), tmp_path)

    assert started("prefill-1", 8001) == started("decode-1", 8002)


def test_values_are_equal_in_every_process() -> None:
    class Kind(enum.Enum):
        A = "a"

    class Mine:
        def to_dict(self) -> dict[str, Any]:
            return {"_name_or_path": "/here", "x": {2, 1}, "kind": Kind.A}

    assert plain(Mine()) == {"x": ["1", "2"], "kind": "a"}
    assert plain(test_values_are_equal_in_every_process).endswith(".test_values_are_equal_in_every_process")
    assert plain((1, [Path("/x")])) == [1, ["PosixPath('/x')"]]
    assert plain(Mine) == plain(Mine)
