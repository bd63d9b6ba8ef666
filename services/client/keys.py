"""User keys become block keys here, and nowhere else.

A block key is 32 bytes. `bytes` of that length are taken as they are (a chain key made by an engine); a `str` is
hashed with its own derivation context, so that a name can never equal a chain key by accident.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from typing import cast

from mooncache import _native
from mooncache.client.limits import MAX_BATCH
from mooncache.errors import InvalidArgument, KeyInvalid, TooLarge

KEY_BYTES = 32
MAX_NAME_BYTES = 65_536

Key = str | bytes


def to_block_key(key: Key) -> bytes:
    """The 32-byte block key of a user key.

    Raises:
        KeyInvalid: not a `str`, and not `bytes` of length 32.
    """
    if isinstance(key, str):
        name = key.encode("utf-8")
        if not name or len(name) > MAX_NAME_BYTES:
            raise KeyInvalid(
                f"A str key needs 1 to {MAX_NAME_BYTES} bytes of UTF-8; this one has {len(name)}."
            )
        return _native.key_of_name(key)
    if isinstance(key, (bytes, bytearray, memoryview)):
        raw = bytes(key)
        if len(raw) == KEY_BYTES:
            return raw
        raise KeyInvalid(
            f"A bytes key must be exactly {KEY_BYTES} bytes (a block key); this one has {len(raw)}. "
            "Pass a str for a key of your own naming."
        )
    raise KeyInvalid(f"A key is a str or {KEY_BYTES} bytes; got {type(key).__name__}.")


def to_block_keys(keys: Iterable[Key]) -> list[bytes]:
    """The block keys of a batch, in order.

    A bytes-like value is a packed chain, as `Passport.chain_keys` makes it: 32 bytes for each key. A lone `str` is
    refused: it would be read letter by letter.
    """
    if isinstance(keys, (bytes, bytearray, memoryview)):
        chain = bytes(keys)
        if len(chain) % KEY_BYTES:
            raise InvalidArgument(
                f"A packed chain has {KEY_BYTES} bytes for each key; got {len(chain)} bytes. "
                "For a single key wrap it: [key]."
            )
        return split_keys(chain)
    if isinstance(keys, str):
        raise InvalidArgument("Expected a list of keys, got a single key. Wrap it: [key].")
    try:
        batch = list(keys)
        # The usual case, thousands of block keys, checked without a call for each of them.
        if set(map(type, batch)) <= {bytes} and set(map(len, batch)) <= {KEY_BYTES}:
            return batch  # type: ignore[return-value]
        return [to_block_key(key) for key in batch]
    except TypeError as error:
        raise InvalidArgument(f"Expected a list of keys, got {type(keys).__name__}.") from error


def pack_keys(keys: Sequence[bytes]) -> bytes:
    """Block keys one after the other, as control messages carry them."""
    return b"".join(keys)


def batch_keys(keys: Iterable[Key]) -> list[bytes]:
    """The block keys of a call's batch. Raises InvalidArgument for more than a call may have."""
    block_keys = to_block_keys(keys)
    if len(block_keys) > MAX_BATCH:
        raise InvalidArgument(f"A batch may have at most {MAX_BATCH} keys; got {len(block_keys)}. Split it.")
    return block_keys


def batch_chain(keys: Iterable[Key] | bytes) -> bytes:
    """The same, packed; a chain that is packed already, thousands of keys perhaps, is not taken apart."""
    if isinstance(keys, bytes) and not len(keys) % KEY_BYTES and len(keys) <= MAX_BATCH * KEY_BYTES:
        return keys
    return pack_keys(batch_keys(cast("Iterable[Key]", keys)))


def count_keys(keys: bytes, count_max: int, name: str = "keys") -> int:
    """How many block keys a control message carries.

    Raises:
        InvalidArgument: the last key is cut.
        TooLarge: more than `count_max`.
    """
    if len(keys) % KEY_BYTES:
        raise InvalidArgument(f"{name} must be a multiple of {KEY_BYTES} bytes, not {len(keys)}")
    count = len(keys) // KEY_BYTES
    if count > count_max:
        raise TooLarge(f"{count} {name} in one call; send at most {count_max}")
    return count


def split_keys(keys: bytes, count_max: int = sys.maxsize) -> list[bytes]:
    """The single block keys of packed ones. Raises what `count_keys` raises."""
    count_keys(keys, count_max)
    return [keys[at : at + KEY_BYTES] for at in range(0, len(keys), KEY_BYTES)]
