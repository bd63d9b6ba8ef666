"""Model families: paged attention gives what each model's own attention gives; what it cannot give is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from mooncache.errors import ConfigInvalid, Unsupported
from mooncache.hf_engine.attention import TokenSpan
from mooncache.hf_engine.model_runner import ModelRunner
from tests.hf_engine.conftest import prompt

SIZES = {
    "vocab_size": 2048,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "initializer_range": 0.08,
    "max_position_embeddings": 512,
}


@pytest.mark.parametrize("family", ["Llama", "Qwen2", "Qwen3", "Mistral"])
def test_logits_are_the_models_own(tmp_path: Path, family: str) -> None:
    torch.manual_seed(1)
    more: dict[str, Any] = {"sliding_window": None} if family == "Mistral" else {}
    config = getattr(transformers, f"{family}Config")(**SIZES, **more)
    model = getattr(transformers, f"{family}ForCausalLM")(config).eval()
    model.save_pretrained(tmp_path)
    runner = ModelRunner(tmp_path, dtype="float32", device="cpu", block_tokens=16, kv_cache_bytes=1 << 20)
    prompts = [prompt(40, 1), prompt(75, 2)]
    tables = [[3, 1, 7], [2, 9, 4, 0, 5]]
    runner.forward([p[:30] for p in prompts], [TokenSpan(t, 0, 30) for t in tables], [0])
    spans = [TokenSpan(t, 30, len(p) - 31) for p, t in zip(prompts, tables, strict=True)]
    runner.forward([p[30:-1] for p in prompts], spans, [])
    last = [TokenSpan(t, len(p) - 1, 1) for p, t in zip(prompts, tables, strict=True)]
    found = runner.forward([p[-1:] for p in prompts], last, [0, 1])
    with torch.inference_mode():
        for one, row in zip(prompts, found, strict=True):
            own = model(torch.tensor([one])).logits[0, -1]
            assert torch.allclose(own, row, atol=1e-3) and own.argmax() == row.argmax()


@pytest.mark.parametrize(
    "config",
    [
        {"model_type": "x", "layer_types": ["full_attention", "sliding_attention"]},
        {"model_type": "x", "sliding_window": 128},
        {"model_type": "x", "kv_lora_rank": 512},
        {"model_type": "x", "is_encoder_decoder": True},
    ],
)
def test_other_attention_is_refused(tmp_path: Path, config: dict[str, Any]) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(Unsupported, match="full causal attention"):
        ModelRunner(tmp_path, dtype="float32", device="cpu", block_tokens=16, kv_cache_bytes=1 << 20)


@pytest.mark.parametrize(
    "config",
    [
        {"rope_scaling": {"type": "dynamic", "factor": 2.0}},
        {"rope_parameters": {"rope_type": "longrope", "rope_theta": 1e4}},
        {"rope_parameters": {"full_attention": {"rope_type": "dynamic", "factor": 2.0}}},
    ],
)
def test_positions_that_move_with_the_length_are_refused(tmp_path: Path, config: dict[str, Any]) -> None:
    """Their keys change when a prompt, or any other one in the same step, grows beyond a length."""
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", **config}))
    with pytest.raises(Unsupported, match="rotary positions"):
        ModelRunner(tmp_path, dtype="float32", device="cpu", block_tokens=16, kv_cache_bytes=1 << 20)


def test_what_a_models_class_adds_to_its_attention_is_refused(tmp_path: Path) -> None:
    """The file does not name the window: it is a default of the class."""
    config = transformers.MistralConfig(**SIZES)
    transformers.MistralForCausalLM(config).save_pretrained(tmp_path)
    written = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(
        json.dumps({key: value for key, value in written.items() if key != "sliding_window"})
    )
    with pytest.raises(Unsupported, match="full causal attention"):
        ModelRunner(tmp_path, dtype="float32", device="cpu", block_tokens=16, kv_cache_bytes=1 << 20)


def test_attention_that_is_not_computed_here_is_refused_at_the_first_step(model_folder: Path) -> None:
    runner = ModelRunner(model_folder, dtype="float32", device="cpu", block_tokens=16, kv_cache_bytes=1 << 20)
    layer = runner.model.model.layers[0].self_attn
    forward = layer.forward
    layer.forward = lambda *args, **more: forward(*args, **more, softcap=50.0)
    with pytest.raises(Unsupported, match="softcap"):
        runner.warm_up()


def test_what_cannot_be_used_is_named(tmp_path: Path, model_folder: Path) -> None:
    with pytest.raises(ConfigInvalid, match=r"config\.json"):
        ModelRunner(tmp_path, dtype="float32", device="cpu", block_tokens=16, kv_cache_bytes=1 << 20)
    with pytest.raises(ConfigInvalid, match="kv_cache_bytes"):
        ModelRunner(model_folder, dtype="float32", device="cpu", block_tokens=4096, kv_cache_bytes=1 << 20)
    with pytest.raises(ConfigInvalid, match=r"hf\.device"):
        ModelRunner(model_folder, dtype="float32", device="nothing", block_tokens=16, kv_cache_bytes=1 << 20)
