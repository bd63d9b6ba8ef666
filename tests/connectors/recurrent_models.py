"""Small models with recurrent states, and random weights so that a state that is not loaded shows.

With the weights that models begin with, states hardly matter, and an engine without them gives the same tokens. Here
convolutions weigh much, and what a state remembers fades slowly.
"""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from typing import Any

_SHAPE = {
    "vocab_size": 8192,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 4096,
}
_FADES_BY = 0.003
"""Of a state of Qwen3-Next, for each token."""


def build(folder: Path, kind: str, tokenizer: Path) -> Path:
    """A model of one kind: lfm2, qwen3-next or falcon-h1, with the tokenizer of that folder."""
    import torch

    torch.manual_seed(7)
    model = {"lfm2": _lfm2, "qwen3-next": _qwen3_next, "falcon-h1": _falcon_h1}[kind]().float()
    for name, weights in model.named_parameters():
        with torch.no_grad():
            _fill(kind, name, weights)
    model.save_pretrained(folder)
    if kind == "lfm2":  # vLLM reads what transformers no longer writes
        path = folder / "config.json"
        config = json.loads(path.read_text())
        hidden = _SHAPE["hidden_size"]
        more = {
            "conv_dim": hidden,
            "conv_dim_out": hidden,
            "block_dim": hidden,
            "block_ffn_dim_multiplier": 1.0,
        }
        path.write_text(json.dumps({**config, **more, "block_multiple_of": 256, "block_norm_eps": 1e-5}))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(tokenizer / name, folder)
    return folder


def _fill(kind: str, name: str, weights: Any) -> None:
    import torch

    if kind == "falcon-h1":
        return  # it is not shared
    if name.endswith("A_log"):
        weights.fill_(math.log(_FADES_BY))
    elif name.endswith("dt_bias"):
        weights.zero_()
    elif "conv.conv." in name or "conv1d" in name:
        torch.nn.init.normal_(weights, std=2.0 if kind == "lfm2" else 0.5)
    elif weights.dim() > 1:
        torch.nn.init.normal_(weights, std=0.06)
        if kind == "lfm2" and (".conv.in_proj" in name or ".conv.out_proj" in name):
            weights.mul_(2.0)
        elif kind == "qwen3-next" and "linear_attn.out_proj" in name:
            weights.mul_(4.0)


def _lfm2() -> Any:
    import transformers

    return transformers.Lfm2ForCausalLM(
        transformers.Lfm2Config(
            **_SHAPE,
            layer_types=["conv", "full_attention"] * 2,
            conv_L_cache=3,
            block_ff_dim=512,
            block_auto_adjust_ff_dim=False,
        )
    )


def _qwen3_next() -> Any:
    import transformers

    return transformers.Qwen3NextForCausalLM(
        transformers.Qwen3NextConfig(
            **_SHAPE,
            head_dim=64,
            layer_types=["linear_attention"] * 3 + ["full_attention"],
            linear_num_key_heads=2,
            linear_num_value_heads=4,
            linear_key_head_dim=128,
            linear_value_head_dim=128,
            linear_conv_kernel_dim=4,
            num_experts=4,
            num_experts_per_tok=2,
            moe_intermediate_size=128,
            shared_expert_intermediate_size=128,
            decoder_sparse_step=1,
            partial_rotary_factor=0.25,
        )
    )


def _falcon_h1() -> Any:
    import transformers

    return transformers.FalconH1ForCausalLM(
        transformers.FalconH1Config(
            **_SHAPE,
            head_dim=64,
            mamba_d_ssm=512,
            mamba_n_heads=8,
            mamba_d_head=64,
            mamba_n_groups=1,
            mamba_d_state=64,
            mamba_d_conv=4,
            mamba_expand=2,
            mamba_chunk_size=64,
        )
    )
