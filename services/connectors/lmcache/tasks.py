"""Tasks of one kind (store, lookup or load) that LMCache submits, and their results, which an event fd announces."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, Final, Generic, TypeVar

from lmcache.v1.platform import create_event_notifier

from mooncache.connectors.lmcache.threads import CallThreads

RESULTS_MAX: Final = 65_536
"""Results that are kept for LMCache; older ones, which it has not asked for, go."""
T = TypeVar("T")


class Tasks(Generic[T]):
    """Thread-safe. Each task has one result, whatever happens to it."""

    def __init__(self, kind: str, threads: int) -> None:
        self._threads = CallThreads(kind, threads)
        self._lock = threading.Lock()
        self._results: dict[int, T] = {}
        self._last = 0
        self._closed = False
        self._notifier: Any = create_event_notifier()

    @property
    def fd(self) -> int:
        """What becomes readable when a task has its result."""
        return int(self._notifier.fileno())

    def submit(self, call: Callable[[], T], otherwise: Callable[[], T]) -> int:
        """The task's number. `otherwise` is the result of a call that raises, or that too many wait before."""
        with self._lock:
            self._last += 1
            number = self._last
        future = self._threads.submit(
            lambda: self._finish(number, self.shielded(call, otherwise)), lambda: None
        )
        if future is None:
            self._finish(number, otherwise())
        return number

    def shielded(self, call: Callable[[], T], otherwise: Callable[[], T]) -> T:
        """The call's answer, on this thread; `otherwise` when it raises."""
        return self._threads.shielded(call, otherwise)

    def _finish(self, number: int, result: T) -> None:
        with self._lock:
            if self._closed:
                return
            if len(self._results) >= RESULTS_MAX:
                del self._results[next(iter(self._results))]
            self._results[number] = result
            self._notifier.notify()

    def take(self, number: int) -> T | None:
        """A task's result, once; None while there is none."""
        with self._lock:
            return self._results.pop(number, None)

    def take_all(self) -> dict[int, T]:
        """All results that are there."""
        with self._lock:
            taken, self._results = self._results, {}
        return taken

    def close(self) -> None:
        """End: tasks under way use no memory of LMCache after that."""
        self._threads.close()
        with self._lock:
            self._closed = True
            self._notifier.close()
