"""Memory back to the system: after a large request the C library keeps what it freed, in case of another one."""

from __future__ import annotations

import ctypes
from typing import Final

_TRIM: Final = getattr(ctypes.CDLL(None), "malloc_trim", None)


def trim() -> None:
    """Give free memory back; milliseconds for hundreds of megabytes, without the GIL. Does nothing without glibc."""
    if _TRIM is not None:
        _TRIM(0)
