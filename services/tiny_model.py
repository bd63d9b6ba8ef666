"""A small Llama with random weights and its own tokenizer, made on the spot: to try the machinery without a download.

Idea: everything that an engine reads from a model folder (weights, configuration, tokenizer, chat template) is real,
only the weights are noise. The text is gibberish, the tokens are not: fp32 weights that are spread widely enough make
greedy output varied and free of ties, so that two runs can be compared token by token.

The tokenizer is a byte-level BPE trained on the sources of Python's standard library, which is text that every machine
has. `python -m mooncache.tiny_model FOLDER` makes one. It needs torch, safetensors and tokenizers (extra `hf`).
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import sysconfig
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from mooncache.errors import ConfigInvalid, InvalidArgument

FOLDER_NAME: Final = "tiny-model"
MARKER: Final = "mooncache_tiny_model.json"
FORMAT: Final = 2  # raise it when the same parameters give another model
SPECIAL_TOKENS: Final = ("<|pad|>", "<|begin|>", "<|end|>", "<|start|>", "<|tools|>", "<|call|>")
PAD_ID, BEGIN_ID, END_ID = 0, 1, 2
_CORPUS_BYTES: Final = 2 << 20
_INITIALIZER_RANGE: Final = 0.08
_VOCAB_MIN: Final = 512

# Typed parts are walked here, not in a macro: engines look for this loop to learn that the template takes parts.
CHAT_TEMPLATE: Final = """\
{%- if tools -%}<|start|>system
<|tools|>{{ tools | tojson }}<|end|>
{% endif -%}
{%- for message in messages -%}<|start|>{{ message['role'] }}
{% if message['content'] is string -%}{{ message['content'] }}
{%- elif message['content'] is iterable -%}
{%- for part in message['content'] -%}{%- if part['type'] == 'text' -%}{{ part['text'] }}{%- endif -%}{%- endfor -%}
{%- endif -%}
{%- for call in message['tool_calls'] or [] -%}<|call|>{{ call | tojson }}{%- endfor -%}<|end|>
{% endfor -%}
{%- if add_generation_prompt -%}<|start|>assistant
{% endif -%}"""


def default_folder(state_dir: Path) -> Path:
    """Where the model of a cluster's state folder lives."""
    return state_dir.expanduser() / "models" / FOLDER_NAME


def build(
    folder: Path,
    *,
    layers: int = 4,
    hidden: int = 256,
    heads: int = 4,
    kv_heads: int = 2,
    vocab: int = 8192,
    seed: int = 0,
    max_positions: int = 16384,
) -> Path:
    """Make the model in `folder`, or return at once when it is there with the same parameters.

    The folder appears whole or not at all: it is made beside its place and renamed. Several processes may call at once.

    Returns:
        The folder.

    Raises:
        InvalidArgument: sizes that do not fit together.
        ConfigInvalid: the folder holds something else; it is left alone.
    """
    sizes = {
        "layers": layers,
        "hidden": hidden,
        "heads": heads,
        "kv_heads": kv_heads,
        "vocab": vocab,
        "seed": seed,
        "max_positions": max_positions,
    }
    if min(layers, hidden, heads, kv_heads, max_positions) < 1 or vocab < _VOCAB_MIN:
        raise InvalidArgument(f"sizes must be positive and vocab at least {_VOCAB_MIN}; got {sizes}")
    if hidden % heads or heads % kv_heads:
        raise InvalidArgument(f"heads must divide hidden, and kv_heads must divide heads; got {sizes}")
    folder = folder.expanduser().absolute()
    marker = {"format": FORMAT, **sizes}
    if _marker_of(folder) == marker:
        return folder
    if folder.exists() and _marker_of(folder) is None and any(folder.iterdir()):
        raise ConfigInvalid(
            f"{folder} holds files that are not a small model made here; choose another folder."
        )
    folder.parent.mkdir(parents=True, exist_ok=True)
    made = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    try:
        _write_tokenizer(made, vocab, max_positions)
        _write_weights(made, sizes)
        (made / "config.json").write_text(json.dumps(_llama_config(sizes), indent=2) + "\n", encoding="utf-8")
        (made / "generation_config.json").write_text(
            json.dumps({"bos_token_id": BEGIN_ID, "eos_token_id": END_ID, "pad_token_id": PAD_ID}) + "\n",
            encoding="utf-8",
        )
        (made / MARKER).write_text(json.dumps(marker) + "\n", encoding="utf-8")
        made.chmod(0o755)
        for path in made.iterdir():
            path.chmod(0o644)  # engines may run as another user
        _take_place(made, folder, marker)
    finally:
        shutil.rmtree(made, ignore_errors=True)
    return folder


def _marker_of(folder: Path) -> dict[str, object] | None:
    """Parameters that the folder was made with; None when the folder was not made here."""
    try:
        found = json.loads((folder / MARKER).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return found if isinstance(found, dict) else None


def _take_place(made: Path, folder: Path, marker: dict[str, Any]) -> None:
    """Rename into place. Another process may have been faster; equal parameters make equal models."""
    for _ in range(3):
        try:
            made.rename(folder)  # replaces an empty folder, fails on a full one
            return
        except OSError:
            if _marker_of(folder) == marker:
                return
        old = Path(tempfile.mkdtemp(prefix=f".{folder.name}-old-", dir=folder.parent))
        try:
            os.replace(folder, old)
        except OSError:
            pass  # gone meanwhile: the next round sees what is there now
        finally:
            shutil.rmtree(old, ignore_errors=True)
    raise ConfigInvalid(f"{folder} cannot be replaced; does another process use it?")


def _corpus() -> Iterator[str]:
    """About two megabytes of text that is the same for every run on this Python."""
    left = _CORPUS_BYTES
    for path in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py")):
        text = path.read_text(encoding="utf-8", errors="ignore")[:left]
        left -= len(text)
        yield text
        if left <= 0:
            return


def _write_tokenizer(folder: Path, vocab: int, max_positions: int) -> None:
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = [AddedToken(text, special=True, normalized=False) for text in SPECIAL_TOKENS]
    trainer = trainers.BpeTrainer(
        vocab_size=vocab,
        special_tokens=special,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_corpus(), trainer)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": SPECIAL_TOKENS[BEGIN_ID],
        "eos_token": SPECIAL_TOKENS[END_ID],
        "pad_token": SPECIAL_TOKENS[PAD_ID],
        "clean_up_tokenization_spaces": False,
        "model_max_length": max_positions,
        "chat_template": CHAT_TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def _llama_config(sizes: dict[str, int]) -> dict[str, object]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": sizes["vocab"],
        "hidden_size": sizes["hidden"],
        "intermediate_size": sizes["hidden"] * 3,
        "num_hidden_layers": sizes["layers"],
        "num_attention_heads": sizes["heads"],
        "num_key_value_heads": sizes["kv_heads"],
        "head_dim": sizes["hidden"] // sizes["heads"],
        "max_position_embeddings": sizes["max_positions"],
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "initializer_range": _INITIALIZER_RANGE,
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": False,
        "use_cache": True,
        "bos_token_id": BEGIN_ID,
        "eos_token_id": END_ID,
        "pad_token_id": PAD_ID,
        "torch_dtype": "float32",
    }


def _shapes(sizes: dict[str, int]) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Name and shape of every tensor of a Llama, in the names that engines expect."""
    hidden, wide = sizes["hidden"], sizes["hidden"] * 3
    kv = hidden // sizes["heads"] * sizes["kv_heads"]
    yield "model.embed_tokens.weight", (sizes["vocab"], hidden)
    for layer in range(sizes["layers"]):
        name = f"model.layers.{layer}"
        yield f"{name}.input_layernorm.weight", (hidden,)
        yield f"{name}.self_attn.q_proj.weight", (hidden, hidden)
        yield f"{name}.self_attn.k_proj.weight", (kv, hidden)
        yield f"{name}.self_attn.v_proj.weight", (kv, hidden)
        yield f"{name}.self_attn.o_proj.weight", (hidden, hidden)
        yield f"{name}.post_attention_layernorm.weight", (hidden,)
        yield f"{name}.mlp.gate_proj.weight", (wide, hidden)
        yield f"{name}.mlp.up_proj.weight", (wide, hidden)
        yield f"{name}.mlp.down_proj.weight", (hidden, wide)
    yield "model.norm.weight", (hidden,)
    yield "lm_head.weight", (sizes["vocab"], hidden)


def _write_weights(folder: Path, sizes: dict[str, int]) -> None:
    import torch
    from safetensors.torch import save_file

    generator = torch.Generator().manual_seed(sizes["seed"])
    tensors = {}
    for name, shape in _shapes(sizes):
        if len(shape) == 1:
            tensors[name] = torch.ones(shape)
        else:
            tensors[name] = torch.randn(shape, generator=generator) * _INITIALIZER_RANGE
    save_file(tensors, str(folder / "model.safetensors"), metadata={"format": "pt"})


def main() -> int:
    """`python -m mooncache.tiny_model FOLDER`: 0 when the model is there, 2 for wrong arguments."""
    if len(sys.argv) != 2 or sys.argv[1].startswith("-"):
        sys.stderr.write("usage: python -m mooncache.tiny_model FOLDER\n")
        return 2
    try:
        sys.stdout.write(f"{build(Path(sys.argv[1]))}\n")
    except (InvalidArgument, ConfigInvalid) as error:
        sys.stderr.write(f"{error}\n")
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
