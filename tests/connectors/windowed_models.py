"""Small models with sliding windows, and random weights spread so widely that KV that is not loaded shows."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

WINDOW = 128
_SHAPE = {
    "vocab_size": 8192,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "tie_word_embeddings": False,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 4096,
    "sliding_window": WINDOW,
}


def build(folder: Path, kind: str, tokenizer: Path) -> Path:
    """A model of one kind: gpt-oss, gemma3, gemma4 or mistral, with the tokenizer of that folder."""
    import torch

    torch.manual_seed(7)
    model = _made(kind).float()
    for name, weights in model.named_parameters():
        if weights.dim() > 1:
            torch.nn.init.normal_(weights, std=0.004 if kind == "gemma3" and "embed" in name else 0.2)
    model.save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(tokenizer / name, folder)
    return folder


def _made(kind: str) -> Any:
    import transformers

    if kind == "gpt-oss":
        layers = {"layer_types": ["sliding_attention", "full_attention"] * 2, "num_hidden_layers": 4}
        experts = {"num_local_experts": 4, "num_experts_per_tok": 2}
        return transformers.GptOssForCausalLM(transformers.GptOssConfig(**_SHAPE, **layers, **experts))
    if kind == "gemma4":
        layers = {"layer_types": ["sliding_attention"] * 5 + ["full_attention"], "num_hidden_layers": 6}
        # What full attention keeps of a token is twice as large: vLLM makes blocks of windows twice as long.
        wide = {"global_head_dim": 64, "hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": 8192}
        return transformers.Gemma4ForCausalLM(transformers.Gemma4TextConfig(**_SHAPE, **layers, **wide))
    if kind == "gemma3":
        layers = {"layer_types": ["sliding_attention"] * 5 + ["full_attention"], "num_hidden_layers": 6}
        config = transformers.Gemma3TextConfig(**_SHAPE, **layers, query_pre_attn_scalar=32)
        return transformers.Gemma3ForCausalLM(config)
    return transformers.MistralForCausalLM(transformers.MistralConfig(**_SHAPE, num_hidden_layers=2))
