"""What SGLang shows about its storage: pages of each call and its bandwidth, as its own StorageMetrics.

The lists are bounded: SGLang takes them from time to time; with its metrics off nothing is kept.
"""

from __future__ import annotations

import threading
from collections import deque
from enum import StrEnum
from typing import Any, Final

CALLS_MAX: Final = 4096
"""Calls of each kind that are kept until SGLang takes them; older ones go."""
_GB: Final = 1 << 30  # what SGLang's other backends divide by


class Operation(StrEnum):
    """The two ways of a page."""

    GET = "get"
    SET = "set"


class PageStats:
    """Calls since the last `take`. Thread-safe."""

    def __init__(self, *, enabled: bool) -> None:
        self._enabled = enabled
        self._lock = threading.Lock()
        self._pages: dict[Operation, deque[int]] = {way: deque(maxlen=CALLS_MAX) for way in Operation}
        self._rates: dict[Operation, deque[float]] = {way: deque(maxlen=CALLS_MAX) for way in Operation}

    def moved(self, way: Operation, pages: int, size_bytes: int, seconds: float) -> None:
        """One call: whole pages and bytes that it moved, and how long it took."""
        if not self._enabled or not pages:
            return
        with self._lock:
            self._pages[way].append(pages)
            self._rates[way].append(size_bytes / _GB / max(seconds, 1e-9))

    def take(self) -> Any:
        """A StorageMetrics with what was counted; from now on it counts anew."""
        from sglang.srt.observability.metrics_collector import StorageMetrics

        with self._lock:
            taken = StorageMetrics(
                prefetch_pgs=list(self._pages[Operation.GET]),
                backup_pgs=list(self._pages[Operation.SET]),
                prefetch_bandwidth=list(self._rates[Operation.GET]),
                backup_bandwidth=list(self._rates[Operation.SET]),
            )
            for way in Operation:
                self._pages[way].clear()
                self._rates[way].clear()
        return taken
