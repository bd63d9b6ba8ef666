"""How much later than predicted first tokens come that had to wait, learnt from those whose waiting mattered.

A request is taken when its promise will be kept, so an error of the prediction is a broken promise. How late first
tokens come, as a share of what was predicted, is kept of the last ones; the margin is the 95th percentile: one in
twenty was later than that. Before anything was seen a first guess is believed. Each observation takes an equal part
of that belief away, so a wrong guess refuses no more than the first requests that wait. Requests that hardly waited
say nothing: what they take is computing, which has a model of its own.
"""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections import deque

SHARE = 0.95
FIRST = 0.5  # believed before anything was seen
TRUSTED = 32  # observations after which nothing of the first guess is believed
MEMORY = 200  # observations that count
MOST = 1.0
MATTERS = 0.1  # waiting of this share of the promise says something


class Lateness:
    """The margin of the predicted TTFT. `value`: the share by which waiting requests may be later than predicted."""

    __slots__ = ("_last", "_sorted", "value")

    def __init__(self) -> None:
        self.value = FIRST
        self._last: deque[float] = deque()
        self._sorted: list[float] = []  # the same values

    def observe(self, predicted_s: float, waiting_s: float, late_s: float, promised_s: float) -> None:
        """Take in a first token that was predicted after `predicted_s`, `waiting_s` of it waiting, and came `late_s`
        after that."""
        if not (predicted_s >= waiting_s >= MATTERS * promised_s > 0 and math.isfinite(late_s)):
            return
        if len(self._last) == MEMORY:
            del self._sorted[bisect_left(self._sorted, self._last.popleft())]
        share = min(MOST, max(0.0, late_s / predicted_s))
        self._last.append(share)
        insort(self._sorted, share)
        count = len(self._last)
        seen = self._sorted[math.ceil(SHARE * count) - 1]
        self.value = seen + (FIRST - seen) * max(0.0, 1.0 - count / TRUSTED)
