"""How much computing was asked for lately, by what a request of it costs; refused requests count too.

Sums in buckets of cost that fade. A few costly requests that happen to come together say little about those to come,
so a part of the standard deviation is taken off (of independent arrivals the sum's variance is the sum of the
squares). Sums that fade fast see a rush within seconds, slow ones see a little too much that lasts. Nothing counts
as asked for before the first request.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np

from mooncache.conductor.core.policy.crowding import BUCKETS, FADES_IN_S, bucket
from mooncache.conductor.core.policy.types import Floats

CHANCE = 0.5  # standard deviations that are taken for chance
_FADING_PER_S: Floats = np.array([[[each / fades_in_s] for fades_in_s in FADES_IN_S] for each in (1.0, 2.0)])
"""Of sums and of sums of squares, for each memory; a sum's square fades twice as fast."""


class OfferedLoadWindow:
    """For each memory, the seconds asked for by all requests up to each bucket, less what may be chance.

    They are added up when they are looked at: only for a request that waits, and after the answer.
    """

    __slots__ = ("_asked", "_found", "_passed_s")

    def __init__(self, asked: Floats, passed_s: float) -> None:
        self._asked, self._passed_s = asked, passed_s
        self._found: tuple[tuple[float, ...], ...] = ()

    def __iter__(self) -> Iterator[tuple[float, ...]]:
        if not self._found:
            sums, squares = (self._asked * _left(self._passed_s)).cumsum(axis=2)
            sums -= CHANCE * np.sqrt(squares, out=squares)
            self._found = tuple(map(tuple, np.maximum(sums, 0.0, out=sums).tolist()))
        return iter(self._found)


class OfferedLoad:
    """The computing that was asked for lately. Times are seconds of one monotonic clock."""

    __slots__ = ("_as_of_s", "_asked", "total_s")

    def __init__(self) -> None:
        self.total_s = 0.0  # of all requests, without fading
        # The sums of each memory, below them the sums of squares: both fade and are added up in one go.
        self._asked: Floats = np.zeros((2, len(FADES_IN_S), BUCKETS))
        self._as_of_s = 0.0

    def add(self, cost_s: float, now_s: float) -> None:
        """Count a request that takes so many seconds of an instance; impossible costs are ignored."""
        if not 0 < cost_s < math.inf:
            return
        self._fade(now_s)
        self.total_s += cost_s
        place = bucket(cost_s)
        self._asked[0, :, place] += cost_s
        self._asked[1, :, place] += cost_s * cost_s

    def lately(self, now_s: float) -> OfferedLoadWindow:
        """What was asked for until now."""
        return OfferedLoadWindow(self._asked.copy(), max(0.0, now_s - self._as_of_s))

    def _fade(self, now_s: float) -> None:
        passed_s = now_s - self._as_of_s
        if passed_s > 0:
            self._asked *= _left(passed_s)
            self._as_of_s = now_s


def _left(passed_s: float) -> Floats:
    """The shares of sums and of sums of squares that are left, for each memory."""
    left: Floats = np.exp(_FADING_PER_S * -passed_s)
    return left
