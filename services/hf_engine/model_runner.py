"""The model: loads it, owns the KV memory, and computes one step.

Idea: the transformers model runs without any cache of its own (`use_cache=False`); attention finds the context in the
paged memory. A step is one forward pass over all tokens of all sequences, laid end to end.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from mooncache.errors import ConfigInvalid, Unsupported
from mooncache.hf_engine import attention
from mooncache.hf_engine.attention import TokenSpan
from mooncache.hf_engine.kv_memory import KvMemory, Tensor

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_BLOCKS_MIN = 2
# Rotary frequencies that follow the length of the longest sequence in a step.
_MOVING_ROPE = frozenset({"dynamic", "longrope", "su"})


def choose_device(wanted: str) -> object:
    """The torch device; "auto" is a GPU when there is one. Raises ConfigInvalid."""
    if wanted == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(wanted)
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError) as error:
        raise ConfigInvalid(f"hf.device is {wanted!r}, which cannot be used: {error}") from None
    return device


class ModelRunner:
    """The loaded model and its KV memory. One thread at a time may call `forward`.

    Args:
        folder: the model's folder (config.json, weights).
        dtype: "float32", "bfloat16" or "float16", for weights and KV.
        device: see `choose_device`.
        block_tokens: tokens of a KV block.
        kv_cache_bytes: memory for KV.

    Raises:
        ConfigInvalid: no model there, or less memory than two blocks.
        Unsupported: an architecture whose KV is not one full causal attention in every layer, or not the prefix's
            alone.
    """

    def __init__(
        self, folder: Path, *, dtype: str, device: str, block_tokens: int, kv_cache_bytes: int
    ) -> None:
        from transformers import AutoModelForCausalLM

        _refuse_other_attention(folder, _read_config(folder))
        attention.register()
        self.device = choose_device(device)
        try:
            model: Any = AutoModelForCausalLM.from_pretrained(
                folder, dtype=_DTYPES[dtype], attn_implementation=attention.NAME, local_files_only=True
            )
        except (OSError, ValueError) as error:
            raise ConfigInvalid(f"The model in {folder} cannot be loaded: {error}") from None
        self.model = model.eval().to(self.device)
        config = model.config.get_text_config()
        _refuse_other_attention(folder, config.to_dict())  # with the defaults of its class
        heads = config.num_attention_heads
        geometry = {
            "layers": config.num_hidden_layers,
            "block_tokens": block_tokens,
            "kv_heads": getattr(config, "num_key_value_heads", None) or heads,
            "head_dim": getattr(config, "head_dim", None) or config.hidden_size // heads,
            "dtype": _DTYPES[dtype],
        }
        one = KvMemory(blocks=1, device="cpu", **geometry).block_bytes
        blocks = kv_cache_bytes // one
        if blocks < _BLOCKS_MIN:
            raise ConfigInvalid(
                f"hf.kv_cache_bytes holds {blocks} blocks of {one} bytes; give at least {_BLOCKS_MIN}."
            )
        self.memory = KvMemory(blocks=blocks, device=self.device, **geometry)
        self.dtype = dtype
        self.vocab: int = config.vocab_size
        self.max_positions: int = config.max_position_embeddings
        self.eos_ids = _eos_ids(model)

    def warm_up(self) -> None:
        """One prompt and one decode, so that the first request does not pay for what is made on first use."""
        self.forward([[0, 0]], [TokenSpan([0], 0, 2)], [0])
        self.forward([[0]], [TokenSpan([0], 2, 1)], [0])
        self.memory.clear([0])

    def forward(
        self, tokens: Sequence[Sequence[int]], spans: Sequence[TokenSpan], choosing: Sequence[int]
    ) -> Tensor:
        """Compute a step: `tokens[i]` are the new tokens of `spans[i]`.

        Returns:
            Logits after the last token of each span in `choosing`, fp32, `[len(choosing), vocabulary]`.
        """
        flat = [token for part in tokens for token in part]
        positions = [p for span in spans for p in range(span.start, span.start + span.count)]
        ends, end = [], 0
        for span in spans:
            end += span.count
            ends.append(end - 1)
        step = attention.make_step(self.memory, spans)
        with torch.inference_mode(), attention.attending(step):
            found = self.model(
                input_ids=torch.tensor([flat], device=self.device),
                position_ids=torch.tensor([positions], device=self.device),
                use_cache=False,
                logits_to_keep=torch.tensor(
                    [ends[i] for i in choosing], dtype=torch.int64, device=self.device
                ),
            )
            return found.logits[0].float()


def _read_config(folder: Path) -> dict[str, object]:
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigInvalid(f"{folder} has no readable config.json: {error}") from None
    if not isinstance(config, dict):
        raise ConfigInvalid(f"{folder / 'config.json'} is not a JSON object.")
    return config


def _refuse_other_attention(folder: Path, config: dict[str, Any]) -> None:
    kinds = set(config.get("layer_types") or ())
    windowed = config.get("sliding_window") and config.get("use_sliding_window", True)
    if kinds - {"full_attention"} or windowed or config.get("is_encoder_decoder") or "kv_lora_rank" in config:
        raise Unsupported(
            f"The model in {folder} ({config.get('model_type')}) has layers without full causal attention; "
            "this engine serves Llama, Qwen2, Qwen3 and models built like them."
        )
    if moving := _rope_kinds(config) & _MOVING_ROPE:
        raise Unsupported(
            f"The model in {folder} ({config.get('model_type')}) has {'/'.join(sorted(moving))} rotary positions: "
            "the KV of a prefix depends on how long the prompt is, so no block could be used again."
        )


def _rope_kinds(config: dict[str, object]) -> set[str]:
    """Kinds of rotary positions, in the old shape and the new one, for the model or for each kind of layer."""
    found: set[str] = set()
    for name in ("rope_scaling", "rope_parameters"):
        table = config.get(name)
        if isinstance(table, dict):
            for part in (table, *table.values()):
                if isinstance(part, dict):
                    found.update(str(part[key]) for key in ("rope_type", "type") if part.get(key))
    return found


def _eos_ids(model: Any) -> frozenset[int]:
    found: set[int] = set()
    for config in (model.config, model.generation_config):
        ids = getattr(config, "eos_token_id", None)
        found.update([ids] if isinstance(ids, int) else ids or ())
    return frozenset(found)
