"""Questions about requests that a thread of their own answers, while vLLM's scheduler goes on."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Generic, TypeVar

Found = TypeVar("Found")


class Inquiries(Generic[Found]):
    """One question for each request. All methods are called on the scheduler's thread."""

    def __init__(self, name: str, changed: threading.Event) -> None:
        """
        Args:
            name: of the thread.
            changed: set when an answer is there.
        """
        self._name = name
        self._changed = changed
        self._thread: ThreadPoolExecutor | None = None
        self._jobs: dict[str, Future[Found]] = {}

    def ask(self, request_id: str, find: Callable[[], Found]) -> Found | None:
        """What `find` finds, which the thread calls once; None while it is not known yet."""
        job = self._jobs.get(request_id)
        if job is None:
            if self._thread is None:
                self._thread = ThreadPoolExecutor(1, thread_name_prefix=self._name)
            job = self._jobs[request_id] = self._thread.submit(find)
            job.add_done_callback(lambda _: self._changed.set())
        return job.result() if job.done() else None

    def forget(self, request_id: str) -> None:
        """The request is over."""
        job = self._jobs.pop(request_id, None)
        if job is not None:
            job.cancel()

    @property
    def pending(self) -> bool:
        """True while an answer is missing."""
        return any(not job.done() for job in self._jobs.values())

    def close(self) -> None:
        """End the thread after the question that it is at."""
        if self._thread is not None:
            self._thread.shutdown(cancel_futures=True)
