"""Whether gateway and engines mean the same by a prompt: a prompt to ask both with, and what to make of the answers.

Keys are made of tokens, so engines that read a prompt as other tokens save blocks that no gateway ever asks for. An
engine says with `return_token_ids` what it made of a prompt: the tokens that its own keys come from.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

BLOCKS_WANTED = 2
_WORDS = (
    "a cache",
    "holds",
    "what",
    "was",
    "read",
    "before",
    "so",
    "that",
    "nothing",
    "is",
    "computed",
    "twice",
)
_SHARE_OF_CONTEXT = 4


class InstanceAgreement(msgspec.Struct, frozen=True):
    """One engine's answer. `first_difference` is the first token that differs; -1: none does.

    Each engine has a salt of its own, so a block under one of `keys` (in hex, made by the gateway) was saved by it.
    """

    instance_id: str
    engine_tokens: int = 0
    first_difference: int = -1
    keys: tuple[str, ...] = ()
    error: str = ""
    """Why it could not be compared; "" when it could."""


class ModelAgreement(msgspec.Struct, frozen=True):
    """One model and its engines."""

    model: str
    prompt_tokens: int = 0
    block_tokens: int = 0
    reason: str = ""
    """Why the gateway makes no keys for it; "" when it does."""
    instances: tuple[InstanceAgreement, ...] = ()


def probe_body(model: str, salt: str, block_tokens: int, tokens_max: int) -> bytes:
    """A chat of some blocks, as JSON, that asks for one token and for the prompt's token ids.

    Args:
        salt: a new one for each trial and engine: its blocks are found by no other request.
        tokens_max: longest prompt of the model; 0 when that is not known.
    """
    wanted = (BLOCKS_WANTED + 1) * max(block_tokens, 1)
    if tokens_max:
        wanted = min(wanted, tokens_max // _SHARE_OF_CONTEXT)
    text = " ".join(_WORDS[at % len(_WORDS)] for at in range(max(wanted, 1)))
    return msgspec.json.encode(
        {
            "model": model,
            "messages": [
                {"role": "system", "content": "Answer briefly."},
                {"role": "user", "content": f"Ünïcode, 数字: {text}?"},
            ],
            "max_tokens": 1,
            "temperature": 0,
            "return_token_ids": True,
            "cache_salt": salt,
        }
    )


def tokens_said(answer: bytes) -> list[int]:
    """The prompt's token ids in an engine's answer. Raises ValueError when there are none."""
    try:
        body: Any = msgspec.json.decode(answer)
        found = body["prompt_token_ids"]
        if not isinstance(found, list) or not all(type(token) is int for token in found):
            raise TypeError
    except (msgspec.DecodeError, KeyError, TypeError, RecursionError):
        raise ValueError("the engine does not say the tokens of a prompt (return_token_ids)") from None
    return found


def first_difference(ours: Sequence[int], theirs: Sequence[int]) -> int:
    """Where two prompts differ first; -1 when they are equal."""
    for at, (one, other) in enumerate(zip(ours, theirs, strict=False)):
        if one != other:
            return at
    return -1 if len(ours) == len(theirs) else min(len(ours), len(theirs))
