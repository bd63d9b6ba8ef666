"""A tokenizer of one token per byte, made on the spot, so that tests can count tokens by eye."""

from __future__ import annotations

import json
from pathlib import Path

from mooncache.kvcache.identity import tokenizer_digest
from mooncache.kvcache.keys import passport_to_json
from mooncache.kvcache.passport import Passport

BLOCK_TOKENS = 16
TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}<a>{% endif %}"
)


def make_tokenizer(folder: Path) -> Path:
    """Write the tokenizer's files; returns the folder."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({symbol: number for number, symbol in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


def passport_of(folder: Path) -> Passport:
    """Passport of an engine with this tokenizer."""
    return Passport(
        weights_digest="w",
        config_digest="c",
        tokenizer_digest=tokenizer_digest(folder),
        engine="fake",
        kv_dtype="f32",
        kv_layout="x",
        block_tokens=BLOCK_TOKENS,
    )


def instance_fields(folder: Path) -> dict[str, object]:
    """Fields of an Instance that uses the tokenizer."""
    return {
        "tokenizer_path": str(folder),
        "passport_json": passport_to_json(passport_of(folder)),
        "block_tokens": BLOCK_TOKENS,
        "pool": True,
    }
