"""KV events as engines publish them: bytes in, plain events out. Nothing in the bytes is believed before it
is checked.

A payload is msgpack: `[timestamp, [event...], rank?]`. An event is a map with its kind under "type" (vLLM
today) or an array with the kind first and the fields in order (older vLLM, SGLang). Block hashes are integers
or bytes. Unknown kinds and unknown fields are passed over; an event that makes no sense is counted and
skipped, the others of its batch count.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

import msgspec

from mooncache.errors import ProtocolError

PAYLOAD_BYTES_MAX: Final = 64 << 20
EVENT_COUNT_MAX: Final = 100_000
HASH_BYTES_MAX: Final = 64
TOKEN_MAX: Final = (1 << 32) - 1
BLOCK_TOKENS_MAX: Final = 1 << 20
SALT_CHARS_MAX: Final = 1024
# Caches that are the engine's own fast memory; "CPU" and "STORAGE" are tiers behind it.
OWN_MEDIA: Final = frozenset({None, "GPU", "HBM", "gpu", "hbm"})

BlockHash = int | bytes


class _Kind(StrEnum):
    STORED = "BlockStored"
    REMOVED = "BlockRemoved"
    CLEARED = "AllBlocksCleared"


_STORED: Final = (
    "block_hashes",
    "parent_block_hash",
    "token_ids",
    "block_size",
    "lora_id",
    "medium",
    "lora_name",
    "extra_keys",
    "group_idx",
)
_REMOVED: Final = ("block_hashes", "medium", "group_idx")


@dataclass(frozen=True, slots=True)
class Stored:
    """Blocks that the engine holds now: consecutive ones of one chain."""

    hashes: tuple[BlockHash, ...]
    parent: BlockHash | None  # hash of the block before the first, None when the first begins a prompt
    tokens: Sequence[int]
    block_tokens: int
    extra_keys: tuple[tuple[object, ...], ...]
    """For every block what its hash depends on beside tokens, () when nothing."""
    lora: bool
    own: bool


@dataclass(frozen=True, slots=True)
class Removed:
    """Blocks that the engine no longer holds."""

    hashes: tuple[BlockHash, ...]
    own: bool


@dataclass(frozen=True, slots=True)
class Cleared:
    """The engine no longer holds anything."""


CacheEvent = Stored | Removed | Cleared


def decode(payload: bytes) -> tuple[list[CacheEvent], int]:
    """Events of one payload, and how many of them made no sense.

    Raises:
        ProtocolError: the payload as a whole is not a batch of events.
    """
    if len(payload) > PAYLOAD_BYTES_MAX:
        raise ProtocolError(f"a batch of {len(payload)} bytes is larger than {PAYLOAD_BYTES_MAX}")
    try:
        batch = msgspec.msgpack.decode(payload)
    except (msgspec.DecodeError, RecursionError, ValueError, TypeError, OverflowError) as error:
        raise ProtocolError(f"not msgpack: {error!r:.200}") from None
    if not isinstance(batch, list) or len(batch) < 2 or not isinstance(batch[1], list):
        raise ProtocolError("a batch has to be [timestamp, [events]]")
    if len(batch[1]) > EVENT_COUNT_MAX:
        raise ProtocolError(f"{len(batch[1])} events in one batch")
    events: list[CacheEvent] = []
    invalid = 0
    for raw in batch[1]:
        try:
            event = _event(raw)
        except (ValueError, TypeError, KeyError, IndexError):
            invalid += 1
            continue
        if event is not None:
            events.append(event)
    return events, invalid


def _event(raw: object) -> CacheEvent | None:
    """One event; None for a kind that is not known. Raises ValueError, TypeError, KeyError or IndexError."""
    if isinstance(raw, dict):
        kind, fields = raw["type"], raw
    elif isinstance(raw, list):
        kind = raw[0]
        names = _STORED if kind == _Kind.STORED else _REMOVED
        fields = dict(zip(names, raw[1:], strict=False))
    else:
        raise TypeError("an event is a map or an array")
    if kind == _Kind.STORED:
        return _stored(fields)
    if kind == _Kind.REMOVED:
        return Removed(_hashes(fields["block_hashes"]), _own(fields))
    return Cleared() if kind == _Kind.CLEARED else None


def _stored(fields: dict[str, object]) -> Stored:
    hashes = _hashes(fields["block_hashes"])
    parent, tokens, size = fields["parent_block_hash"], fields["token_ids"], fields["block_size"]
    if type(size) is not int or not 0 < size <= BLOCK_TOKENS_MAX:
        raise ValueError("block_size")
    if not isinstance(tokens, list) or len(tokens) != len(hashes) * size:
        raise ValueError("token_ids")
    if not all(type(token) is int for token in tokens) or (
        tokens and not 0 <= min(tokens) <= max(tokens) <= TOKEN_MAX
    ):
        raise ValueError("a token id")
    lora = fields.get("lora_id") is not None or bool(fields.get("lora_name"))
    return Stored(
        hashes=hashes,
        parent=None if parent is None else _hash(parent),
        tokens=tokens,
        block_tokens=size,
        extra_keys=_extra_keys(fields, parent, len(hashes)),
        lora=lora,
        own=_own(fields),
    )


def _own(fields: dict[str, object]) -> bool:
    """Whether the event is about the engine's own memory and its first group of layers."""
    medium = fields.get("medium")
    if medium is not None and not isinstance(medium, str):
        raise TypeError("medium")
    return medium in OWN_MEDIA and fields.get("group_idx") in (None, 0) and fields.get("locality") != "REMOTE"


def _hashes(value: object) -> tuple[BlockHash, ...]:
    if not isinstance(value, list):
        raise TypeError("block_hashes")
    return tuple(_hash(item) for item in value)


def _hash(value: object) -> BlockHash:
    if type(value) is int or (isinstance(value, bytes) and 0 < len(value) <= HASH_BYTES_MAX):
        return value
    raise TypeError("a block hash")


def _extra_keys(fields: dict[str, object], parent: object, count: int) -> tuple[tuple[object, ...], ...]:
    """As vLLM says them; SGLang has the salt of a prompt in a field of its own, in the events of all its blocks."""
    value, salt = fields.get("extra_keys"), fields.get("cache_salt")
    if value is None:
        first: tuple[object, ...] = (salt,) if salt and parent is None else ()
        return (first, *((),) * (count - 1))[:count]
    if not isinstance(value, list) or len(value) != count:
        raise ValueError("extra_keys")
    found = []
    for item in value:
        if item is not None and not isinstance(item, list):
            raise TypeError("extra_keys")
        found.append(tuple(item or ()))
    return tuple(found)
