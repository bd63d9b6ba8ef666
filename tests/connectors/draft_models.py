"""Models that draft: what they propose is mostly right, and depends on the KV of their own layers."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

WEAK = 0.02
"""By what a layer's output is smaller: the last token then says most of the next one."""


def weakened(folder: Path, model: Path) -> Path:
    """The model with layers that change little, so that a head of one layer can guess what it says."""
    from safetensors.torch import load_file, save_file

    shutil.copytree(model, folder)
    for path in folder.glob("*.safetensors"):
        tensors = load_file(path)
        for name in tensors:
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                tensors[name] = tensors[name] * WEAK
        save_file(tensors, path, metadata={"format": "pt"})
    return folder


def eagle_head(folder: Path, model: Path) -> Path:
    """A head in the manner of EAGLE for a Llama: one layer over the next token and the model's hidden state."""
    import torch
    from safetensors.torch import save_file

    config = json.loads((model / "config.json").read_text())
    hidden, head, inner = config["hidden_size"], config["head_dim"], config["intermediate_size"]
    wide, narrow = config["num_attention_heads"] * head, config["num_key_value_heads"] * head
    chooser = torch.Generator().manual_seed(3)

    def noise(rows: int, columns: int, factor: float = 1.0) -> torch.Tensor:
        return torch.randn(rows, columns, generator=chooser) * 0.08 * factor

    tensors = {
        "fc.weight": torch.cat((torch.eye(hidden), torch.zeros(hidden, hidden)), dim=1),
        "layers.0.self_attn.q_proj.weight": noise(wide, hidden),
        "layers.0.self_attn.k_proj.weight": noise(narrow, hidden),
        "layers.0.self_attn.v_proj.weight": noise(narrow, hidden),
        "layers.0.self_attn.o_proj.weight": noise(hidden, wide),
        "layers.0.mlp.gate_proj.weight": noise(inner, hidden),
        "layers.0.mlp.up_proj.weight": noise(inner, hidden),
        "layers.0.mlp.down_proj.weight": noise(hidden, inner, WEAK),
        "layers.0.post_attention_layernorm.weight": torch.ones(hidden),
    }
    folder.mkdir()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 1}))
    return folder
