"""Threads for calls to the pool, with a limit on how many calls wait.

Idea: LMCache submits and goes on. A call that finds `WAITING_MAX_CALLS` before it is not made at all: its answer would
come too late, and what it keeps alive is memory of the engine.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Final, TypeVar

from mooncache.runtime.logs import Event, get_logger

_log = get_logger(__name__)
WAITING_MAX_CALLS: Final = 1024
DEFECTS_LOGGED_MAX: Final = 100
T = TypeVar("T")


class CallThreads:
    """Runs calls of one kind. An error in a call is logged, and its answer is what it has for that case."""

    def __init__(self, kind: str, threads: int) -> None:
        self._kind = kind
        self._free = threading.BoundedSemaphore(WAITING_MAX_CALLS)
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix=f"mooncache-{kind}")
        self._defects = 0

    def submit(self, call: Callable[[], T], otherwise: Callable[[], T]) -> Future[T] | None:
        """The call's future, which never has an error; None when too many wait, and after `close`."""
        if not self._free.acquire(blocking=False):
            return None
        try:
            future = self._pool.submit(self.shielded, call, otherwise)
        except RuntimeError:  # closed
            self._free.release()
            return None
        future.add_done_callback(lambda _: self._free.release())
        return future

    def shielded(self, call: Callable[[], T], otherwise: Callable[[], T]) -> T:
        """The call's answer, on this thread; `otherwise` when it raises."""
        try:
            return call()
        except Exception as error:  # noqa: BLE001  (an error here must not be one of the engine)
            self._defects += 1
            if self._defects <= DEFECTS_LOGGED_MAX:
                _log.error(
                    Event.CONNECTOR_DEFECT, method=self._kind, error=type(error).__name__, reason=str(error)
                )
            return otherwise()

    def close(self) -> None:
        """End: calls under way are waited for (they have time limits), those that wait are cancelled."""
        self._pool.shutdown(wait=True, cancel_futures=True)
