"""Sizes and durations as people write them: "8GiB", "500ms". A bare number is in the field's own unit."""

from __future__ import annotations

import math
import re
from typing import Annotated, Any, Final

from pydantic import BeforeValidator

_SIZE: Final = {
    "": 1,
    "b": 1,
    "kb": 10**3,
    "mb": 10**6,
    "gb": 10**9,
    "tb": 10**12,
    "kib": 1 << 10,
    "mib": 1 << 20,
    "gib": 1 << 30,
    "tib": 1 << 40,
}
_DURATION: Final = {
    "": 1.0,
    "us": 1e-6,
    "ms": 1e-3,
    "s": 1.0,
    "m": 60.0,
    "min": 60.0,
    "h": 3600.0,
    "d": 86400.0,
}
_QUANTITY: Final = re.compile(r"\s*([0-9]{1,20}(?:\.[0-9]{1,9})?)\s*([A-Za-z]*)\s*")


def _quantity(value: Any, units: dict[str, Any], what: str) -> float | int:
    if isinstance(value, bool):
        raise ValueError(f"{value} is not {what}")
    if isinstance(value, (int, float)):
        if not math.isfinite(value) or value < 0:
            raise ValueError(f"{value} is not {what}")
        return value
    match = _QUANTITY.fullmatch(value) if isinstance(value, str) else None
    if match is None or match[2].lower() not in units:
        raise ValueError(f"{value!r} is not {what}")
    number = float(match[1]) if "." in match[1] else int(match[1])
    result: float | int = number * units[match[2].lower()]
    return result


def parse_size_bytes(value: object) -> int:
    """Bytes from 1073741824, "1GiB" or "1.5 GB". Raises ValueError."""
    size = _quantity(value, _SIZE, 'a size; write bytes or for example "512MiB" or "8GiB"')
    if size != int(size):
        raise ValueError(f"{value!r} is not a whole number of bytes")
    return int(size)


def parse_duration_s(value: object) -> float:
    """Seconds from 1.5, "500ms" or "2h". Raises ValueError."""
    return float(_quantity(value, _DURATION, 'a duration; write seconds or for example "500ms" or "2min"'))


SizeBytes = Annotated[int, BeforeValidator(parse_size_bytes)]
DurationS = Annotated[float, BeforeValidator(parse_duration_s)]
