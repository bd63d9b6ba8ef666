"""The identity of KV: what must be equal before one engine may read another's blocks.

A passport is derived from a running engine, never typed by hand. Its digest is the root of every block key,
so engines whose passports differ anywhere cannot form the same key; `Passport.diff` names the field.
Encoding and digest are the native ones (native/include/mooncache/passport.h).
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, fields
from functools import lru_cache
from typing import Final

from mooncache import _native
from mooncache.errors import InvalidArgument

SCHEMA_VERSION = 1
_ROOTS_MAX: Final = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class Passport:
    """Everything that decides what the bytes of a block mean.

    Digests are hexadecimal or any other text that is equal exactly when the thing is. `lora` and
    `tenant_salt` are empty when not used. `block_tokens` is the number of tokens of a block; ranks count
    from 0. Raises InvalidArgument for empty digests and impossible numbers.
    """

    weights_digest: str
    config_digest: str
    tokenizer_digest: str
    engine: str
    kv_dtype: str
    kv_layout: str
    block_tokens: int
    tp_rank: int = 0
    tp_size: int = 1
    pp_rank: int = 0
    pp_size: int = 1
    lora: str = ""
    tenant_salt: str = ""
    schema_version: int = SCHEMA_VERSION

    def __post_init__(self) -> None:
        for name in (
            "weights_digest",
            "config_digest",
            "tokenizer_digest",
            "engine",
            "kv_dtype",
            "kv_layout",
        ):
            if not getattr(self, name):
                raise InvalidArgument(f"passport field {name} is empty: derive it from the running engine")
        if self.block_tokens < 1:
            raise InvalidArgument(f"block_tokens is {self.block_tokens}, it must be at least 1")
        for kind in ("tp", "pp"):
            rank, size = getattr(self, f"{kind}_rank"), getattr(self, f"{kind}_size")
            if not 0 <= rank < size:
                raise InvalidArgument(
                    f"{kind}_rank is {rank}, it must be from 0 to {kind}_size - 1 = {size - 1}"
                )
        if self.schema_version < 1:
            raise InvalidArgument(f"schema_version is {self.schema_version}, it must be at least 1")

    def entries(self) -> list[tuple[str, str]]:
        """(field, value) in the order of the class; numbers are written in decimal."""
        return [(field.name, str(getattr(self, field.name))) for field in fields(self)]

    def root(self) -> bytes:
        """Digest of the canonical encoding, 32 bytes."""
        return _root(self)

    def chain_keys(self, tokens: Sequence[int] | object, parent: bytes | None = None) -> bytes:
        """Keys of the complete blocks of `tokens`, 32 bytes each, concatenated.

        `tokens` is a sequence of token ids or a contiguous array of 32- or 64-bit integers (numpy, array).
        `parent` is the last key of a chain that these tokens continue. Raises InvalidArgument for token ids
        outside 0..4294967295, other item types and a parent that is not 32 bytes.
        """
        try:
            if isinstance(tokens, list | tuple | range):
                tokens = array("I", tokens)
            return _native.chain_keys(self.root(), tokens, self.block_tokens, parent)
        except (ValueError, OverflowError, TypeError, BufferError) as error:
            raise InvalidArgument(f"cannot make block keys: {error}") from None

    def diff(self, other: Passport) -> list[tuple[str, str, str]]:
        """(field, mine, theirs) of every field that differs; empty exactly when the roots are equal."""
        pairs = zip(self.entries(), other.entries(), strict=True)
        return [(name, mine, theirs) for (name, mine), (_, theirs) in pairs if mine != theirs]


@lru_cache(_ROOTS_MAX)
def _root(passport: Passport) -> bytes:
    """Every request asks several times for the root of the same few passports; equal passports have one root."""
    try:
        return _native.passport_root(passport.entries())
    except ValueError as error:
        raise InvalidArgument(str(error)) from None


def key_of_name(name: str) -> bytes:
    """Block key (32 bytes) of a name chosen by a user."""
    return _native.key_of_name(name)
