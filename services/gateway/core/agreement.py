"""Whether gateway and engines mean the same by a prompt: a prompt to ask both with, and what to make of the answers.

Keys are made of tokens, so engines that read a prompt as other tokens save blocks that no gateway ever asks for. An
engine says with `return_token_ids` what it made of a prompt: the tokens that its own keys come from.

The blocks that an engine saved of it are then read back by another one: see `read_back.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import sha256
from typing import Any, NamedTuple

import msgspec

from mooncache.gateway.core.read_back import ReadBack

BLOCKS_WANTED = 2
ANSWER_TOKENS_MAX = 4
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
    read_backs: tuple[ReadBack, ...] = ()
    """One for each engine whose blocks another one, or itself, was asked to load."""


class EngineTokens(NamedTuple):
    """Token ids in an engine's answer: of the prompt as it read it, and those that it generated."""

    prompt: list[int]
    generated: list[int]


def probe_fields(model: str, salt: str, block_tokens: int, tokens_max: int) -> dict[str, Any]:
    """The body of a chat of some blocks that asks for one token and for the prompt's token ids.

    Args:
        salt: a new one for each trial and engine: its blocks are found by no other request. It also decides the
            order of the words, which are the same for all.
        tokens_max: longest prompt of the model; 0 when that is not known.
    """
    wanted = (BLOCKS_WANTED + 1) * max(block_tokens, 1)
    if tokens_max:
        wanted = min(wanted, tokens_max // _SHARE_OF_CONTEXT)
    order = sorted(range(max(wanted, 1)), key=lambda at: sha256(f"{salt} {at}".encode()).digest())
    words = [_WORDS[at % len(_WORDS)] for at in order]
    return {
        "model": model,
        "messages": [
            {"role": "system", "content": "Answer briefly."},
            {"role": "user", "content": f"Ünïcode, 数字: {' '.join(words)}?"},
        ],
        "max_tokens": 1,
        "temperature": 0,
        "return_token_ids": True,
        "cache_salt": salt,
    }


def answer_tokens(prompt_tokens: int, block_tokens: int) -> int:
    """How many tokens to generate: so few that they complete no block, which would be saved and never removed."""
    return max(1, min(ANSWER_TOKENS_MAX, block_tokens - prompt_tokens % max(block_tokens, 1)))


def tokens_said(answer: bytes) -> EngineTokens:
    """The token ids in an engine's answer. Raises ValueError when it does not say those of the prompt."""
    try:
        body: Any = msgspec.json.decode(answer)
        found = _ids(body["prompt_token_ids"])
    except (msgspec.DecodeError, KeyError, TypeError, RecursionError):
        raise ValueError("the engine does not say the tokens of a prompt (return_token_ids)") from None
    try:
        return EngineTokens(found, _ids(body["choices"][0]["token_ids"]))
    except (KeyError, IndexError, TypeError):
        return EngineTokens(found, [])


def _ids(found: Any) -> list[int]:
    if not isinstance(found, list) or not all(type(token) is int for token in found):
        raise TypeError
    return found


def first_difference(ours: Sequence[int], theirs: Sequence[int]) -> int:
    """Where two prompts differ first; -1 when they are equal."""
    for at, (one, other) in enumerate(zip(ours, theirs, strict=False)):
        if one != other:
            return at
    return -1 if len(ours) == len(theirs) else min(len(ours), len(theirs))
