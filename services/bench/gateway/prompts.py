"""A tokenizer and conversations for the benchmark, made from text that every Python has: its language reference.

Byte-level BPE with the split of Llama 3 and its style of chat template, 8,192 tokens. Prompts are shuffled paragraphs,
so no two are alike and none is in a cache by accident.
"""

from __future__ import annotations

import json
import random
from functools import cache
from pathlib import Path
from typing import Any

_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_SPECIALS = ("<|begin|>", "<|start|>", "<|end|>")
_TEMPLATE = (
    "<|begin|>{% for message in messages %}<|start|>{{ message.role }}\n\n{{ message.content | trim }}<|end|>"
    "{% endfor %}{% if add_generation_prompt %}<|start|>assistant\n\n{% endif %}"
)
_VOCAB = 8192


@cache
def paragraphs() -> list[str]:
    """Paragraphs of prose, 200 characters and more."""
    from pydoc_data import topics

    text = "\n\n".join(topics.topics.values())
    return [part for part in text.split("\n\n") if len(part) >= 200]


def make_tokenizer(folder: Path) -> None:
    """Write tokenizer.json and tokenizer_config.json, in about a second."""
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE(ignore_merges=True))
    stages = [
        pre_tokenizers.Split(Regex(_SPLIT), "isolated"),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
    ]
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(stages)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=_VOCAB,
        special_tokens=[AddedToken(text, special=True, normalized=False) for text in _SPECIALS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(paragraphs(), trainer)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": _SPECIALS[0],
        "eos_token": _SPECIALS[2],
        "chat_template": _TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")


def text(dice: random.Random, chars: int) -> str:
    """Prose of about so many characters."""
    parts: list[str] = []
    size = 0
    while size < chars:
        parts.append(dice.choice(paragraphs()))
        size += len(parts[-1]) + 2
    return "\n\n".join(parts)[:chars]


def conversation(dice: random.Random, chars: int, turns: int) -> list[dict[str, Any]]:
    """User and assistant in turn, ending with the user."""
    count = 2 * turns - 1
    roles = ("user", "assistant")
    return [{"role": roles[at % 2], "content": text(dice, chars // count)} for at in range(count)]


def next_turn(dice: random.Random, messages: list[dict[str, Any]], chars: int) -> list[dict[str, Any]]:
    """The conversation one turn later: an answer and a question are added, of so many characters together."""
    answer = {"role": "assistant", "content": text(dice, chars // 2)}
    return [*messages, answer, {"role": "user", "content": text(dice, chars - chars // 2)}]
