"""Checks that the control calls share: bytes from the network are looked at before they are used."""

from __future__ import annotations

from mooncache.client.keys import count_keys
from mooncache.errors import InvalidArgument

MAX_KEYS = 65_536
MAX_TTL_MS = 7 * 24 * 3_600_000


def check_keys(keys: bytes) -> int:
    """Number of packed keys.

    Raises:
        InvalidArgument: not a whole number of keys, or none.
        TooLarge: more than one call may carry.
    """
    if not keys:
        raise InvalidArgument("keys must hold at least one key")
    return count_keys(keys, MAX_KEYS)
