"""Time as something that is handed in: services take a Clock, tests and simulations pass another one.

`now_s` never goes back and is the only time that decisions may use; `wall_s` is for people (logs, "started
at"). SystemClock is the machine's time, LoopClock the running event loop's (virtual under
virtual_time.VirtualTimeLoop), ManualClock stands still until a test moves it.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
import time
from typing import Protocol


class Clock(Protocol):
    """What services know about time. All values are seconds."""

    def now_s(self) -> float:
        """Monotonic time; only differences mean something."""
        ...

    def wall_s(self) -> float:
        """Time since the Unix epoch, for people only."""
        ...

    async def sleep(self, delay_s: float) -> None:
        """Let `delay_s` pass; 0 or less only lets others run."""
        ...


class SystemClock:
    """The machine's clocks."""

    def now_s(self) -> float:
        return time.monotonic()

    def wall_s(self) -> float:
        return time.time()

    async def sleep(self, delay_s: float) -> None:
        await asyncio.sleep(max(0.0, delay_s))


class LoopClock:
    """The time of the running event loop; `wall_s` is the same number from `wall_start_s` on."""

    def __init__(self, wall_start_s: float = 0.0) -> None:
        self._wall_start_s = wall_start_s

    def now_s(self) -> float:
        return asyncio.get_running_loop().time()

    def wall_s(self) -> float:
        return self._wall_start_s + self.now_s()

    async def sleep(self, delay_s: float) -> None:
        await asyncio.sleep(max(0.0, delay_s))


class ManualClock:
    """Stands still until `advance`; sleepers wake in the order of their times."""

    def __init__(self, now_s: float = 0.0) -> None:
        self._now_s = now_s
        self._order = itertools.count()
        self._sleepers: list[tuple[float, int, asyncio.Future[None]]] = []

    def now_s(self) -> float:
        return self._now_s

    def wall_s(self) -> float:
        return self._now_s

    async def sleep(self, delay_s: float) -> None:
        if delay_s <= 0:
            await asyncio.sleep(0)
            return
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        heapq.heappush(self._sleepers, (self._now_s + delay_s, next(self._order), future))
        await future

    def advance(self, delta_s: float) -> None:
        """Move time on and wake every sleeper whose time has come (they run when the loop next gets its turn)."""
        if delta_s < 0:
            raise ValueError("time does not go back")
        self._now_s += delta_s
        while self._sleepers and self._sleepers[0][0] <= self._now_s:
            future = heapq.heappop(self._sleepers)[2]
            if not future.done():
                future.set_result(None)
