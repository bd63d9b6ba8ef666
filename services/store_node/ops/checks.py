"""Checks that the control calls share: bytes from the network are looked at before they are used."""

from __future__ import annotations

from mooncache.errors import InvalidArgument, LimitExceeded

KEY_BYTES = 32
MAX_KEYS = 65_536
MAX_TTL_MS = 7 * 24 * 3_600_000


def check_keys(keys: bytes) -> int:
    """Number of packed keys.

    Raises:
        InvalidArgument: not a whole number of keys, or none.
        LimitExceeded: more than one call may carry.
    """
    count, rest = divmod(len(keys), KEY_BYTES)
    if rest or not count:
        raise InvalidArgument(f"keys must hold at least one key of {KEY_BYTES} bytes; got {len(keys)} bytes.")
    if count > MAX_KEYS:
        raise LimitExceeded(f"One call may carry at most {MAX_KEYS} keys; got {count}.")
    return count
