"""What the gateway and the process that reads large bodies say to each other.

The process (shell/preparing.py starts it) is asked twice: what does this body want (`Parse`), and, once the gateway
knows model and tenant, which tokens and keys has its prompt (`Tokenize`).
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass
from typing import Final

import msgspec

from mooncache.gateway.core.body import InferenceRequest, TokenizedPrompt
from mooncache.gateway.core.faults import Fault

FRAME_BYTES_MAX: Final = 4 << 30


@dataclass(frozen=True, slots=True)
class TokenizerSource:
    """Whose tokens a prompt has: the tokenizer's folder and its digest, the model's passport as JSON, and the salts."""

    folder: str
    digest: str
    passport: str
    salt: str
    public_salt: str  # "" while nothing is shared


class Parse(msgspec.Struct, tag=True, frozen=True):
    """The body follows in a frame of its own."""

    chat: bool
    choice_count_max: int


class Tokenize(msgspec.Struct, tag=True, frozen=True):
    """Tokens and keys of the body that was parsed last, for a model of that length (0: not known)."""

    source: TokenizerSource | None  # None: only what is forwarded
    model_tokens: int = 0


class Drop(msgspec.Struct, tag=True, frozen=True):
    """Forget the body that was parsed last."""


class Parsed(msgspec.Struct, tag=True, frozen=True):
    """What a body wants."""

    request: InferenceRequest


class Refused(msgspec.Struct, tag=True, frozen=True):
    """The body is refused."""

    fault: Fault


class Tokenized(msgspec.Struct, tag=True, frozen=True):
    """`tokens` and the rest: see `TokenizedPrompt`; `is_known` False: they cannot be known for sure."""

    forward: bytes
    is_known: bool = False
    tokens: list[bytes] = []
    prompt_json: bytes = b""
    keys: bytes = b""
    content_keys: bytes = b""
    public_tokens: int = 0
    block_tokens: int = 0
    passport_root: bytes = b""


COMMANDS: object = Parse | Tokenize | Drop
ANSWERS: object = Parsed | Refused | Tokenized


def message_of(forward: bytes, tokenized: TokenizedPrompt | None) -> Tokenized:
    """As it travels."""
    if tokenized is None:
        return Tokenized(forward)
    return Tokenized(
        forward,
        is_known=True,
        tokens=[tokens.tobytes() for tokens in tokenized.prompts],
        prompt_json=tokenized.prompt_json,
        keys=tokenized.keys,
        content_keys=tokenized.content_keys,
        public_tokens=tokenized.public_tokens,
        block_tokens=tokenized.block_tokens,
        passport_root=tokenized.passport_root,
    )


def tokenized_of(found: Tokenized) -> TokenizedPrompt | None:
    """As it arrived."""
    if not found.is_known:
        return None
    prompts = [array("I", data) for data in found.tokens]
    return TokenizedPrompt(
        tuple(map(len, prompts)),
        prompts,
        found.prompt_json,
        found.keys,
        found.content_keys,
        found.public_tokens,
        found.block_tokens,
        found.passport_root,
    )
