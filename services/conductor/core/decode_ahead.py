"""How many sequences every instance will be decoding, some seconds from now.

A ring of time buckets with a column for each instance. A request adds the curve "shall be generating then" to its
instance: it joins when its prompt is expected to be computed, and leaves with the survival curve of its class
(Mooncache's answer to the uniform t_d of arXiv 2407.00079, section 7, which is the curve of a step). When its first
token comes the curve is moved to that moment, when it ends the rest of it is taken away. What generates longer than
its curve said decays with the mean stay. One request costs one short vector, one look ahead two rows of the ring.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from mooncache.conductor.core.policy.types import Floats

BUCKET_S = 1.0
BUCKETS = 128
LATER_S = np.arange(BUCKETS, dtype=np.float64) * BUCKET_S


@dataclass(slots=True)
class Curve:
    """What a request added, from bucket `at` on, to the instance `row`; empty when nothing is left of it."""

    row: int = 0
    at: int = 0
    sequences: float = 0.0
    kv_tokens: float = 0.0
    share: Floats = field(default_factory=lambda: np.zeros(0))


class DecodeAhead:
    """See the module's text. Times are seconds of one monotonic clock."""

    def __init__(self) -> None:
        self._bucket = 0
        self._sequences = np.zeros((BUCKETS, 0))
        self._kv_tokens = np.zeros((BUCKETS, 0))

    def room(self, rows: int) -> None:
        """Make space for so many instances."""
        self._sequences = _wider(self._sequences, rows)
        self._kv_tokens = _wider(self._kv_tokens, rows)

    def clear(self, row: int) -> None:
        """Forget what an instance would decode."""
        self._sequences[:, row] = 0.0
        self._kv_tokens[:, row] = 0.0

    def roll(self, now_s: float) -> None:
        """Empty the buckets that have passed; they are the farthest ahead now."""
        bucket = int(now_s / BUCKET_S)
        passed = bucket - self._bucket
        if passed <= 0:
            return
        if passed >= BUCKETS:
            self._sequences[:] = 0.0
            self._kv_tokens[:] = 0.0
        else:
            for at in range(self._bucket, bucket):
                self._sequences[at % BUCKETS] = 0.0
                self._kv_tokens[at % BUCKETS] = 0.0
        self._bucket = bucket

    def add(self, curve: Curve, share: Floats, now_s: float, join_s: float) -> None:
        """Add a request that joins in `join_s` seconds; share[k]: of its answers, how many last longer than k
        buckets."""
        self.roll(now_s)
        ahead = min(int((now_s + join_s) / BUCKET_S) - self._bucket, BUCKETS - 1)
        curve.at, curve.share = self._bucket + ahead, share[: BUCKETS - ahead]
        self._change(curve, 1.0)

    def drop(self, curve: Curve) -> None:
        """Take away what is left of a request."""
        if len(curve.share):
            self._change(curve, -1.0)
            curve.share = curve.share[:0]

    def at(
        self,
        now_s: float,
        after_s: float,
        batch: tuple[Floats, Floats],
        foreign: tuple[Floats, Floats],
        stay_s: Floats,
    ) -> tuple[Floats, Floats]:
        """Return (sequences, kv tokens) of each instance in `after_s` seconds.

        batch: what is decoded now, by the curves or longer than they said. foreign: what others sent there.
        """
        rows = len(stay_s)
        here = self._bucket % BUCKETS
        bucket = max(self._bucket, int((now_s + after_s) / BUCKET_S))
        there = min(bucket, self._bucket + BUCKETS - 1) % BUCKETS
        left = np.exp(-after_s / np.maximum(stay_s, 1e-3))
        found = []
        for ring, now, other in zip((self._sequences, self._kv_tokens), batch, foreign, strict=True):
            overdue = np.maximum(now - ring[here, :rows], 0.0)
            found.append(np.maximum(ring[there, :rows], 0.0) + (overdue + other) * left)
        return found[0], found[1]

    def _change(self, curve: Curve, sign: float) -> None:
        begin = max(curve.at, self._bucket)
        share = curve.share[begin - curve.at :]
        at = begin % BUCKETS
        first, rest = share[: BUCKETS - at], share[BUCKETS - at :]
        for ring, weight in ((self._sequences, curve.sequences), (self._kv_tokens, curve.kv_tokens)):
            ring[at : at + len(first), curve.row] += sign * weight * first
            if len(rest):
                ring[: len(rest), curve.row] += sign * weight * rest


def _wider(ring: Floats, rows: int) -> Floats:
    found = np.zeros((BUCKETS, rows))
    found[:, : ring.shape[1]] = ring
    return found
