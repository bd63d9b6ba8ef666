"""What a caller of the SDK may ask for in one call, and the checks that say so."""

from __future__ import annotations

from mooncache.errors import InvalidArgument

MAX_BATCH = 65_536
MAX_TIMEOUT_S = 3_600.0
MAX_REPLICAS = 16
MAX_TTL_S = 7 * 24 * 3_600.0
MAX_PREFETCH_BYTES = 1 << 40
PREFETCH_BYTES = 256 << 20


def check_timeout(timeout_s: float) -> float:
    """A time limit in seconds that is usable, or InvalidArgument with the reason."""
    if isinstance(timeout_s, bool) or not isinstance(timeout_s, (int, float)):
        raise InvalidArgument(f"timeout_s must be a number of seconds; got {type(timeout_s).__name__}.")
    if not 0 < timeout_s <= MAX_TIMEOUT_S:
        raise InvalidArgument(
            f"timeout_s must be above 0 and at most {MAX_TIMEOUT_S:g} seconds; got {timeout_s}."
        )
    return float(timeout_s)


def check_count(name: str, value: int, low: int, high: int) -> int:
    """An int from `low` to `high`, or InvalidArgument with the reason."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise InvalidArgument(f"{name} must be an int; got {type(value).__name__}.")
    if not low <= value <= high:
        raise InvalidArgument(f"{name} must be between {low} and {high}; got {value}.")
    return value
