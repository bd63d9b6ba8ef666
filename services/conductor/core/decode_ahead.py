"""How many sequences every instance will be decoding, some seconds from now.

A table of time buckets with a column for each instance. A request adds the curve "shall be generating then" to its
instance: it joins when its prompt is expected to be computed, and leaves with the survival curve of its class
(Mooncache's answer to the uniform t_d of arXiv 2407.00079, section 7, which is the curve of a step). When its first
token comes the curve is moved to that moment, when it ends the rest of it is taken away. What generates longer than
its curve said decays with the mean stay. One request costs one short vector, one look ahead two lines of the table.
The table is twice as long as the future that it holds: the present moves along it, and is moved back at its end.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from mooncache.conductor.core.policy.fleet import Even
from mooncache.conductor.core.policy.types import Floats

BUCKET_S = 1.0
BUCKETS = 128
LATER_S = np.arange(BUCKETS, dtype=np.float64) * BUCKET_S
# Lines of a power of two would put all of an instance's column into the same few places of the processor's caches.
_PAD = 8
_NOTHING = np.zeros((0, 2))


@dataclass(slots=True)
class Curve:
    """What a request adds to the instance `row`."""

    row: int = 0
    at: int = 0
    whole: Floats = field(default_factory=lambda: _NOTHING)
    """Line k: (sequences, kv tokens) that are still there k buckets after it joined."""
    load: Floats = field(default_factory=lambda: _NOTHING)
    """What of `whole` was added, from bucket `at` on; empty when nothing is left of it."""


class DecodeAhead:
    """The expected number of decoding sequences per instance and time. Times are seconds of one monotonic clock."""

    def __init__(self) -> None:
        self._bucket = 0
        self._begin = 0  # bucket of the first line
        self._table = np.zeros((2 * BUCKETS, 2, 0))  # bucket, sequences or kv tokens, instance

    def room(self, rows: int) -> None:
        """Make space for so many instances."""
        wider = np.zeros((2 * BUCKETS, 2, rows + _PAD))
        wider[:, :, : self._table.shape[2]] = self._table
        self._table = wider

    def clear(self, row: int) -> None:
        """Forget what an instance would decode."""
        self._table[:, :, row] = 0.0

    def roll(self, now_s: float) -> None:
        """Go on to the present; buckets that have passed count no longer."""
        bucket = int(now_s / BUCKET_S)
        if bucket <= self._bucket:
            return
        self._bucket = bucket
        passed = bucket - self._begin
        if passed < BUCKETS:
            return
        left = self._table[passed:].copy()
        self._table[: len(left)] = left
        self._table[len(left) :] = 0.0
        self._begin = bucket

    def add(self, curve: Curve, now_s: float, join_s: float) -> None:
        """Add a request that joins in `join_s` seconds."""
        self.roll(now_s)
        # Who read the clock before others moved the present joins now: lines behind it may be gone.
        ahead = max(0, min(int((now_s + join_s) / BUCKET_S) - self._bucket, BUCKETS - 1))
        curve.at = self._bucket + ahead
        curve.load = curve.whole[: BUCKETS - ahead]
        at = curve.at - self._begin
        there = self._table[at : at + len(curve.load), :, curve.row]
        np.add(there, curve.load, out=there)

    def drop(self, curve: Curve) -> None:
        """Take away what is left of a request."""
        passed = max(0, self._bucket - curve.at)
        load, curve.load = curve.load[passed:], _NOTHING
        if len(load):
            at = curve.at + passed - self._begin
            there = self._table[at : at + len(load), :, curve.row]
            np.subtract(there, load, out=there)

    def at(
        self,
        now_s: float,
        moments_s: Sequence[float],
        batch: Floats,
        foreign: Floats | None,
        stay_s: Even,
    ) -> Floats:
        """A table of moment, (sequences, kv tokens) and instance; moments are seconds from now.

        batch: what is decoded now, by the curves or longer than they said. foreign: what others sent there, None
        when none did. Both are two columns: sequences and KV tokens.
        """
        rows = batch.shape[1]
        here = self._bucket - self._begin
        overdue = batch - self._table[here, :, :rows]
        np.maximum(overdue, 0.0, out=overdue)
        if foreign is not None:
            overdue += foreign
        least_s = max(stay_s, 1e-3) if isinstance(stay_s, float) else np.maximum(stay_s, 1e-3)
        found = np.empty((len(moments_s), 2, rows))
        for at, after_s in enumerate(moments_s):
            ahead = max(0, int((now_s + after_s) / BUCKET_S) - self._bucket)
            np.maximum(self._table[here + min(ahead, BUCKETS - 1), :, :rows], 0.0, out=found[at])
            found[at] += overdue * np.exp(-after_s / least_s)
        return found
