"""Ends a task that waits too long, at the price of two assignments per step instead of a timer per step."""

from __future__ import annotations

import asyncio
from types import TracebackType
from typing import Self


class Watchdog:
    """`expect` says what the current task now waits for; beyond its limit the task is cancelled and `fired` names it.

    Use as `with Watchdog() as dog`; the caller turns the CancelledError into an error of its own when `fired` is set.
    """

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        task = asyncio.current_task()
        assert task is not None
        self._task = task
        self._what = ""
        self._until_s = float("inf")
        self._timer: asyncio.TimerHandle | None = None
        self._timer_s = float("inf")
        self.fired = ""

    def expect(self, what: str, limit_s: float) -> None:
        """From now on `what` has to end within `limit_s`."""
        self._what = what
        self._until_s = self._loop.time() + limit_s
        if self._until_s < self._timer_s:
            self._arm()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def _arm(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer_s = self._until_s
        self._timer = self._loop.call_at(self._until_s, self._check)

    def _check(self) -> None:
        self._timer, self._timer_s = None, float("inf")
        if self._loop.time() < self._until_s:
            self._arm()  # it went on in the meantime
        else:
            self.fired = self._what
            self._task.cancel()
