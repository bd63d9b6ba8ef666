"""How likely blocks of a class are used again now, learnt while requests come (no clock, no randomness).

Idea: chains that look alike when they are used (`Signals`) share a class; a class has a hazard of reuse, uses
per second, in each of 16 bands of age (time since last use). The classes are a grid: the time between the last
two uses of the session (a shape over age) times a score (turn of the session, length of the chain, blocks that
were new), in steps of 5 %. The hazard starts at a prior and is corrected by what happens: first by band of
age, then by score, by shape and by class, each with imagined events, so that a class that was never seen follows the
others. By band they are many while the prior is about right and few when traffic is unlike it (`_trust`). What was
counted fades, so that other traffic is learnt anew.
The worth of a block that has not been used for some time is the most hits per second of residence that it can
still bring over any horizon (Gittins' index): it rises until the usual time of an answer and falls after it.

Only + - * / and comparisons, in a fixed order, so that another implementation can compute the same bits.
The prior was fitted (Poisson regression, ridge) on the first half of the public conversation trace.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

# Bands of age: band k begins at BAND_BEGIN_S[k]; the last has no end.
BANDS: Final = 16
BAND_BEGIN_S: Final = (
    0.0,
    8.0,
    12.0,
    18.0,
    27.0,
    40.0,
    60.0,
    90.0,
    136.0,
    205.0,
    307.0,
    461.0,
    692.0,
    1038.0,
    1557.0,
    2335.0,
)
END_S: Final = 7200.0  # what the last band counts for in the index

# Reuses per 1,000 s by shape and band. Shape 0: first use of a session; others by GAP_BEGIN_S.
GAP_BEGIN_S: Final = (0.0, 30.0, 60.0, 120.0, 240.0)
SHAPES: Final = 1 + len(GAP_BEGIN_S)
_BASE_PER_KS: Final = tuple(
    tuple(float(number) for number in row.split())
    for row in (
        "0.445 0.551 0.651 0.778 1.104 1.521 1.474 1.177 0.804 0.521 0.361 0.232 0.124 0.099 0.079 0.063",
        "0.808 1.457 1.997 2.701 3.741 4.251 3.3 2.33 1.396 0.818 0.613 0.421 0.243 0.195 0.156 0.125",
        "0.404 0.691 0.921 1.32 2.362 3.549 3.886 2.475 1.304 0.717 0.432 0.254 0.146 0.117 0.094 0.075",
        "0.271 0.447 0.592 0.827 1.544 2.472 2.893 2.364 1.504 0.851 0.49 0.239 0.113 0.09 0.072 0.058",
        "0.275 0.403 0.543 0.758 1.205 1.8 2.247 2.362 1.864 1.26 0.747 0.376 0.168 0.129 0.103 0.082",
        "0.24 0.352 0.455 0.592 0.916 1.35 1.635 1.429 1.197 1.004 0.829 0.569 0.273 0.176 0.14 0.112",
    )
)
# Scores: steps of about 5 % in the hazard.
_TURN_BEGIN: Final = (1, 2, 3, 4, 5, 6, 8, 11)
_TURN_SCORE: Final = (-2, -10, -4, -1, 2, 6, 5, 10)
_LENGTH_BEGIN: Final = (1, 3, 5, 9, 15, 25, 40, 80)
_LENGTH_SCORE: Final = (-33, 7, 6, 8, 7, 6, 7, -1)
_NEW_BEGIN: Final = (0, 2, 3, 5, 9, 15, 25, 40)
_NEW_SCORE: Final = (3, 4, 4, 1, -3, -1, -3, 1)
SCORE_MIN, SCORE_MAX = -39, 24
_STEP: Final = 1.051
SCORES: Final = SCORE_MAX - SCORE_MIN + 1
# The score counts less as blocks get older, in sixteenths: a session that comes back late is like any other.
_SCORE_WEIGHT: Final = (16, 16, 16, 16, 16, 16, 16, 16, 16, 16, 12, 8, 4, 0, 0, 0)
LEFT: Final = SHAPES * SCORES  # class of what a session left behind when it went on with another chain
PARTIAL: Final = (
    LEFT + 1
)  # class of last blocks that are not full: only a repeat of the whole prompt hits them
# Classes of beginnings that several sessions share, by the time between their last two uses.
SHARED: Final = PARTIAL + 1
SHARED_GAP_BEGIN_S: Final = (0.0, 2.0, 8.0, 30.0, 120.0, 480.0)
CLASSES: Final = SHARED + len(SHARED_GAP_BEGIN_S)
_SHARED_FACTOR: Final = 20.0
_LEFT_FACTOR: Final = 0.03
_PARTIAL_FACTOR: Final = 0.03

LATE: Final = 11  # from this band on only the band's own correction counts
_EVENTS_BAND: Final = 200.0  # imagined events of each correction
_EVENTS_BAND_MIN: Final = 1.0
_TRUST: Final = 10.0
_EVENTS_SCORE: Final = 40.0
_EVENTS_SHAPE: Final = 40.0
_EVENTS_CLASS: Final = 40.0
_KEEP: Final = 0.96  # of all counts, at each refresh


class Signals(NamedTuple):
    """What is seen of a chain when it is used."""

    turn: int  # 1: an unknown session
    gap_s: float  # since the session's last use; 0 at the first
    blocks: int
    new_blocks: int


def class_of(signals: Signals) -> int:
    shape = 0 if signals.turn <= 1 else bisect_right(GAP_BEGIN_S, signals.gap_s)
    score = (
        _TURN_SCORE[bisect_right(_TURN_BEGIN, signals.turn) - 1]
        + _LENGTH_SCORE[bisect_right(_LENGTH_BEGIN, signals.blocks) - 1]
        + _NEW_SCORE[bisect_right(_NEW_BEGIN, signals.new_blocks) - 1]
    )
    return shape * SCORES + min(max(score, SCORE_MIN), SCORE_MAX) - SCORE_MIN


def shared_class(gap_s: float) -> int:
    return SHARED + bisect_right(SHARED_GAP_BEGIN_S, gap_s) - 1


def band_of(age_s: float) -> int:
    return bisect_right(BAND_BEGIN_S, age_s) - 1


def _prior() -> NDArray[np.float64]:
    factors = [1.0]
    for _ in range(SCORE_MAX):
        factors.append(factors[-1] * _STEP)
    for _ in range(-SCORE_MIN):
        factors.insert(0, factors[0] / _STEP)
    prior = np.empty((BANDS, CLASSES))
    for band in range(BANDS):
        for shape in range(SHAPES):
            base = _BASE_PER_KS[shape][band] / 1000.0
            for score in range(SCORES):
                weighed = (score + SCORE_MIN) * _SCORE_WEIGHT[band]
                steps = -(-weighed // 16) if weighed < 0 else weighed // 16  # towards 0
                prior[band, shape * SCORES + score] = base * factors[steps - SCORE_MIN]
        prior[band, LEFT] = _BASE_PER_KS[0][band] / 1000.0 * _LEFT_FACTOR
        prior[band, SHARED:] = _BASE_PER_KS[0][band] / 1000.0 * _SHARED_FACTOR
        prior[band, PARTIAL] = _BASE_PER_KS[0][band] / 1000.0 * _PARTIAL_FACTOR
    return prior


def _total(values: NDArray[np.float64]) -> float:
    """One after the other: NumPy's own sum depends on the processor."""
    return float(np.cumsum(values)[-1])


def _trust(seen: Sequence[float], expected: Sequence[float]) -> float:
    """Imagined events of the prior's bands: few when what is seen is far from it.

    A gamma prior of mean 1 for each band's correction has the variance 1 / events; the variance is estimated by
    moments, as what the squared differences have beyond the Poisson noise.
    """
    excess, weight = 0.0, 0.0
    for count, mean in zip(seen, expected, strict=True):
        excess += (count - mean) * (count - mean) - mean
        weight += mean * mean
    if excess * _EVENTS_BAND <= weight * _TRUST:
        return _EVENTS_BAND
    return max(weight * _TRUST / excess, _EVENTS_BAND_MIN)


class Hazard:
    """Counts of reuses and of seconds without, per band and class, and what follows from them."""

    def __init__(self) -> None:
        self._prior = _prior()
        self.events = np.zeros((BANDS, CLASSES))
        self.exposure_s = np.zeros((BANDS, CLASSES))
        self.worth: list[list[float]] = []  # [class][band], hits per second and block
        self.refresh()

    def waited(self, klass: int, band: int, seconds: float) -> None:
        """A chain of the class was not used for so long while its age was in the band."""
        self.exposure_s[band, klass] += seconds

    def reused(self, klass: int, band: int, seconds: float) -> None:
        """A chain was used, so many seconds after it came into the band."""
        self.exposure_s[band, klass] += seconds
        self.events[band, klass] += 1.0

    def refresh(self) -> None:
        """Recompute the worths and let the counts fade."""
        self._rate = self._estimate()
        self.worth = self._index(self._rate).T.tolist()
        self.events *= _KEEP
        self.exposure_s *= _KEEP

    def worth_of(self, klass: int, age_s: float) -> float:
        """Hits per second and block of a chain of the class that was used so long ago."""
        worth, band = self.worth[klass], band_of(age_s)
        begin_s = BAND_BEGIN_S[band]
        if band == BANDS - 1:
            return worth[band] * (begin_s / age_s)
        return worth[band] + (worth[band + 1] - worth[band]) * (
            (age_s - begin_s) / (BAND_BEGIN_S[band + 1] - begin_s)
        )

    def chance_of(self, klass: int, age_s: float) -> float:
        """Chance that a chain of the class, used so long ago, is used again before it is END_S old."""
        alive = 1.0
        for band in range(band_of(age_s), BANDS):
            begin_s = max(BAND_BEGIN_S[band], age_s)
            end_s = BAND_BEGIN_S[band + 1] if band + 1 < BANDS else END_S
            if begin_s >= end_s:
                break
            passed = float(self._rate[band, klass]) * (end_s - begin_s)
            alive -= alive * (passed / (1.0 + passed))
        return 1.0 - alive

    def _estimate(self) -> NDArray[np.float64]:
        events = self.events
        rate = self._prior.copy()
        live = slice(0, LEFT)
        seen_b = [_total(events[band, live]) for band in range(BANDS)]
        expected_b = [_total(self.exposure_s[band, live] * rate[band, live]) for band in range(BANDS)]
        trust = _trust(seen_b, expected_b)
        for band in range(BANDS):
            rate[band] *= (seen_b[band] + trust) / (expected_b[band] + trust)
        for axis, imagined in ((0, _EVENTS_SCORE), (1, _EVENTS_SHAPE)):
            seen, expected_c = self._by_class(events), self._by_class(self.exposure_s * rate)
            grid = (SHAPES, SCORES)
            seen_x = self._last(np.cumsum(seen[live].reshape(grid), axis=axis), axis)
            expected_x = self._last(np.cumsum(expected_c[live].reshape(grid), axis=axis), axis)
            corrected = (seen_x + imagined) / (expected_x + imagined)
            rate[:LATE, live] *= np.tile(corrected, SHAPES) if axis == 0 else np.repeat(corrected, SCORES)
        seen, expected_c = self._by_class(events), self._by_class(self.exposure_s * rate)
        ratio = (seen + _EVENTS_CLASS) / (expected_c + _EVENTS_CLASS)
        rate[:LATE] *= ratio
        rate[LATE:, LEFT:] *= ratio[LEFT:]
        return rate

    @staticmethod
    def _last(sums: NDArray[np.float64], axis: int) -> NDArray[np.float64]:
        return sums[-1] if axis == 0 else sums[:, -1]

    @staticmethod
    def _by_class(values: NDArray[np.float64]) -> NDArray[np.float64]:
        total: NDArray[np.float64] = values[0].copy()
        for band in range(1, BANDS):
            total += values[band]
        return total

    @staticmethod
    def _index(rate: NDArray[np.float64]) -> NDArray[np.float64]:
        width = [b - a for a, b in zip(BAND_BEGIN_S, (*BAND_BEGIN_S[1:], END_S), strict=True)]
        worth = np.zeros_like(rate)
        for first in range(BANDS):
            alive, hits, seconds = np.ones(CLASSES), np.zeros(CLASSES), np.zeros(CLASSES)
            for band in range(first, BANDS):
                passed = rate[band] * width[band]
                used = alive * (passed / (1.0 + passed))
                hits = hits + used
                seconds = seconds + used / rate[band]
                alive = alive - used
                worth[first] = np.maximum(worth[first], hits / seconds)
        return worth
