"""Reports that wait to be acknowledged, in their order: a bounded queue, sent batch by batch, again and again.

A report leaves the queue when the conductor that leads has taken it in, so an outage of the conductor loses none. When
there are too many, those that tell of no end go first: the conductor counts a request on until it hears of its end, and
an end says all that is needed for that. What is refused is sent again in halves, so that one wrong report is found
and dropped alone.

A call costs many times a report. The news that all goes well with a request may wait a moment for others that go with
it: no decision waits for that, and the conductor learns how long ago it was.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, Final, Generic, TypeVar

from mooncache.runtime.backoff import Backoff

if TYPE_CHECKING:
    import random

COUNT_MAX: Final = 4096  # that wait
BYTES_MAX: Final = 16 << 20
BATCH_COUNT_MAX: Final = 64
BATCH_BYTES_MAX: Final = 1 << 20  # a batch ends with the report that passes it
AGAIN_FIRST_S: Final = 0.1
AGAIN_MAX_S: Final = 2.0
LINGER_S: Final = 0.02  # of a report that may wait for others

Report = TypeVar("Report")


@dataclass(frozen=True, slots=True)
class Loss:
    """How many reports were dropped; `is_first` of the first ones since the queue was empty."""

    count: int = 0
    is_first: bool = False


NO_LOSS: Final = Loss()


@dataclass(frozen=True, slots=True)
class WaitingReport(Generic[Report]):
    """One report. `made_s`: when it was made; `lingers`: it may wait for others."""

    report: Report
    decision_id: str
    request_id: str
    is_end: bool
    size_bytes: int
    made_s: float
    lingers: bool = False

    @property
    def due_s(self) -> float:
        """When it has to be sent."""
        return self.made_s + LINGER_S if self.lingers else self.made_s


class ReportQueue(Generic[Report]):
    """The reports of one lane. Times are seconds of one monotonic clock; `rng` spreads the waits before another try."""

    def __init__(self, rng: random.Random, *, count_max: int = COUNT_MAX, bytes_max: int = BYTES_MAX) -> None:
        self._count_max, self._bytes_max = count_max, bytes_max
        self._waiting: deque[WaitingReport[Report]] = deque()
        self._sending = 0  # of the first ones: how many are under way
        self._batch_max = BATCH_COUNT_MAX
        self._progress = 0  # how many tell of no end
        self._has_lost = False
        self._backoff = Backoff(rng, AGAIN_FIRST_S, AGAIN_MAX_S)
        self.size_bytes = 0

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, waiting: WaitingReport[Report]) -> Loss:
        """Keep a report until it is acknowledged. Returns what had to go, the report itself perhaps."""
        self._append(waiting)
        if not self._is_full():
            return NO_LOSS
        before = len(self._waiting)
        if self._progress:
            self._drop_progress()
        while self._is_full() and len(self._waiting) > self._sending:
            self._forget(self._waiting[self._sending])
            del self._waiting[self._sending]  # the conductor forgets the oldest first by itself
        return self._lost(before - len(self._waiting))

    def due_in_s(self, now_s: float) -> float | None:
        """How long the next batch may wait for more reports; None: there is none."""
        if not self._waiting:
            return None
        if len(self._waiting) >= self._batch_max:
            return 0.0
        return max(0.0, min(waiting.due_s for waiting in self._waiting) - now_s)

    def batch(self) -> list[WaitingReport[Report]]:
        """The next reports to send, in their order; none while nothing waits. They stay here."""
        found: list[WaitingReport[Report]] = []
        size_bytes = 0
        for waiting in islice(self._waiting, self._batch_max):
            found.append(waiting)
            size_bytes += waiting.size_bytes
            if size_bytes > BATCH_BYTES_MAX:
                break
        self._sending = len(found)
        return found

    def acknowledged(self) -> None:
        """The conductor has taken the batch in."""
        for _ in range(self._sending):
            self._forget(self._waiting.popleft())
        self._sending, self._batch_max = 0, BATCH_COUNT_MAX
        self._backoff.reset()
        self._has_lost = self._has_lost and bool(self._waiting)

    def failed(self) -> float:
        """The batch was not acknowledged; return how many seconds to wait before it is sent again."""
        self._sending = 0
        return self._backoff.next_s()

    def refused(self) -> Loss:
        """The conductor will not take the batch: half of it is sent next. A report that is refused alone is dropped."""
        if self._sending > 1:
            self._batch_max, self._sending = self._sending // 2, 0
            return NO_LOSS
        self.acknowledged()
        return self._lost(1)

    def open_ends(self) -> Iterator[str]:
        """Decisions whose end the conductor has not acknowledged yet."""
        return (waiting.decision_id for waiting in self._waiting if waiting.is_end)

    def check(self) -> None:
        """Raise AssertionError when an invariant is broken."""
        assert self.size_bytes == sum(waiting.size_bytes for waiting in self._waiting), "bytes are wrong"
        assert self._progress == sum(not waiting.is_end for waiting in self._waiting), "kinds are wrong"
        assert 0 <= self._sending <= len(self._waiting), "more are under way than there are"

    def _is_full(self) -> bool:
        return len(self._waiting) > self._count_max or self.size_bytes > self._bytes_max

    def _append(self, waiting: WaitingReport[Report]) -> None:
        self._waiting.append(waiting)
        self.size_bytes += waiting.size_bytes
        self._progress += not waiting.is_end

    def _forget(self, waiting: WaitingReport[Report]) -> None:
        self.size_bytes -= waiting.size_bytes
        self._progress -= not waiting.is_end

    def _drop_progress(self) -> None:
        """Drop all that tell of no end and are not under way: room for many, so that it is not done for each."""
        kept = list(self._waiting)
        self._waiting.clear()
        self.size_bytes = self._progress = 0
        for at, waiting in enumerate(kept):
            if at < self._sending or waiting.is_end:
                self._append(waiting)

    def _lost(self, count: int) -> Loss:
        is_first = bool(count) and not self._has_lost
        self._has_lost = bool(self._waiting) and (self._has_lost or bool(count))
        return Loss(count, is_first)
