"""LoRA adapters with random weights, and the model that one of them makes of another model."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

RANK = 8
ALPHA = 32
_PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj")


def make_adapter(folder: Path, model: Path, seed: int, **config: Any) -> Path:
    """An adapter of the attention of a Llama, with weights that matter."""
    import torch
    from safetensors.torch import save_file

    read = json.loads((model / "config.json").read_text())
    hidden, head = read["hidden_size"], read["head_dim"]
    wide, narrow = read["num_attention_heads"] * head, read["num_key_value_heads"] * head
    sizes = {
        "q_proj": (hidden, wide),
        "k_proj": (hidden, narrow),
        "v_proj": (hidden, narrow),
        "o_proj": (wide, hidden),
    }
    chooser = torch.Generator().manual_seed(seed)
    tensors = {}
    for layer in range(read["num_hidden_layers"]):
        for name in _PROJECTIONS:
            inputs, outputs = sizes[name]
            place = f"base_model.model.model.layers.{layer}.self_attn.{name}"
            tensors[f"{place}.lora_A.weight"] = torch.randn(RANK, inputs, generator=chooser) * 0.05
            tensors[f"{place}.lora_B.weight"] = torch.randn(outputs, RANK, generator=chooser) * 0.05
    folder.mkdir(parents=True)
    save_file(tensors, folder / "adapter_model.safetensors")
    content = {
        "peft_type": "LORA",
        "r": RANK,
        "lora_alpha": ALPHA,
        "target_modules": list(_PROJECTIONS),
        "bias": "none",
        "base_model_name_or_path": str(model),
        **config,
    }
    (folder / "adapter_config.json").write_text(json.dumps(content))
    return folder


def merged(folder: Path, model: Path, adapter: Path) -> Path:
    """The model with the adapter added to its weights: what transformers can run without knowing of adapters."""
    from safetensors.torch import load_file, save_file

    shutil.copytree(model, folder)
    (weights,) = folder.glob("*.safetensors")
    tensors, added = load_file(weights), load_file(adapter / "adapter_model.safetensors")
    for name in [name for name in added if name.endswith(".lora_A.weight")]:
        place = name.removeprefix("base_model.model.").removesuffix(".lora_A.weight")
        low, high = added[name], added[name.replace("lora_A", "lora_B")]
        tensors[f"{place}.weight"] += high @ low * (ALPHA / RANK)
    save_file(tensors, weights, metadata={"format": "pt"})
    return folder
