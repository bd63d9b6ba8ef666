"""How much computing was asked for lately, by what a request of it costs; refused requests count too.

Sums in buckets of cost that fade. A few costly requests that happen to come together say little about those to come,
so a part of the standard deviation is taken off (of independent arrivals the sum's variance is the sum of the
squares). Sums that fade fast see a rush within seconds, slow ones see a little too much that lasts. Nothing counts
as asked for before the first request.
"""

from __future__ import annotations

import math

import numpy as np

from mooncache.conductor.core.policy.crowding import BUCKETS, FADES_IN_S, bucket
from mooncache.conductor.core.policy.types import Floats

CHANCE = 0.5  # standard deviations that are taken for chance


class AskedWork:
    """The computing that was asked for lately. Times are seconds of one monotonic clock."""

    __slots__ = ("_as_of_s", "_fades_in_s", "_squares", "_sums")

    def __init__(self) -> None:
        self._fades_in_s: Floats = np.array(FADES_IN_S)[:, None]
        self._sums: Floats = np.zeros((len(FADES_IN_S), BUCKETS))
        self._squares: Floats = np.zeros((len(FADES_IN_S), BUCKETS))
        self._as_of_s = 0.0

    def ask(self, cost_s: float, now_s: float) -> None:
        """Count a request that takes so many seconds of an instance; impossible costs are ignored."""
        if not 0 < cost_s < math.inf:
            return
        self._fade(now_s)
        at = bucket(cost_s)
        self._sums[:, at] += cost_s
        self._squares[:, at] += cost_s * cost_s

    def lately(self, now_s: float) -> tuple[tuple[float, ...], ...]:
        """For each memory, the seconds asked for by all requests up to each bucket, less what may be chance."""
        self._fade(now_s)
        found = self._sums.cumsum(axis=1) - CHANCE * np.sqrt(self._squares.cumsum(axis=1))
        return tuple(tuple(asked_s) for asked_s in np.maximum(found, 0.0).tolist())

    def _fade(self, now_s: float) -> None:
        passed_s = now_s - self._as_of_s
        if passed_s > 0:
            left = np.exp(-passed_s / self._fades_in_s)
            self._sums *= left
            self._squares *= left * left
            self._as_of_s = now_s
