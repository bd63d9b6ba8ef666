"""The prefill model, corrected with every observed prefill: robust regression over the last observations.

The form is the papers' polynomial, a + b(n-p) + c(n^2-p^2) + d p. Two steps, made anew with each observation. First
the prior is scaled by the median of observed over predicted: half of the observations may be anything (a compile, a
stall, a throttled machine) without moving it; its fixed cost is that of quick prefills with little to compute. Then
the four coefficients are fitted to relative errors by least squares that are weighted again and again with Tukey's
biweight, so that what lies far off counts nothing, and pulled towards the scaled prior, so that coefficients nothing
was seen of stay sensible. The newest observations weigh most: a lasting change of speed is followed once it makes up
half of the weight. Coefficients stay in the range in which more cache never costs more.
"""

from __future__ import annotations

import math
from collections import deque

import numpy as np

from mooncache.conductor.core.policy.types import Floats, PrefillCost

WINDOW = 96
FADES_IN = 32.0  # observations
_ROUNDS = 4
_BIWEIGHT = 4.685  # times the scale of the residuals: 95 % efficient when errors are normal
_SCALE_LEAST = 0.03  # relative; clocks and batches are not finer
_FAR = 1e6  # an error that counts nothing, whatever the others are
_PULL = 1.0  # of the prior, in observations
_PRIOR_WEIGHT = 1.5  # in observations: a single one does not outvote it, two that agree do
_MOSTLY = 0.5  # of what was seen: less than this for tokens, and the rest is fixed cost
_QUICK = 0.25  # of the prefills are quick ones
_REFIT_ALWAYS = 32  # observations; after them every fourth one
_SECONDS_LEAST, _SECONDS_MAX = 1e-6, 3600.0
_TOKENS_MAX = 100_000_000


class PrefillLearner:
    """The prefill model of one type of instance; `observe` improves `cost`."""

    def __init__(self, prior: PrefillCost) -> None:
        self.cost = prior
        self.count = 0
        self._prior = np.array(prior)
        self._seen: deque[tuple[float, float, float, float, float]] = deque(maxlen=WINDOW)

    def observe(self, n: int, p: int, seconds: float) -> bool:
        """Take in one prefill of n tokens with p cached; return False for an impossible one."""
        if not (
            0 < n <= _TOKENS_MAX and 0 <= p < n and math.isfinite(seconds) and 0 < seconds <= _SECONDS_MAX
        ):
            return False
        self._seen.append(
            (1.0, float(n - p), float(n) * n - float(p) * p, float(p), max(seconds, _SECONDS_LEAST))
        )
        self.count += 1
        if self.count <= _REFIT_ALWAYS or self.count % 4 == 0:
            self._fit()
        return True

    def _fit(self) -> None:
        table = np.array(self._seen)
        features, seconds = table[:, :4], table[:, 4]
        ages = np.arange(len(table))[::-1]
        newness = np.exp(-ages / FADES_IN)
        ratios = np.append(seconds / (features @ self._prior), 1.0)
        factor = _weighted_median(ratios, np.append(newness, _PRIOR_WEIGHT))
        prior = self._prior * factor
        prior[0] = _fixed_s(features, seconds, newness, prior)
        theta = np.ones(4)  # in units of the scaled prior
        pull = _PULL * np.eye(4)
        scaled = features * prior
        for _ in range(_ROUNDS):
            expected = np.maximum(scaled @ theta, 1e-9)
            # As a share of the smaller one: ten times too slow is as far off as ten times too fast.
            errors = np.clip((seconds - expected) / np.minimum(expected, seconds), -_FAR, _FAR)
            scale = max(_SCALE_LEAST, 1.4826 * _weighted_median(np.abs(errors), newness))
            reach = np.clip(1.0 - (errors / (_BIWEIGHT * scale)) ** 2, 0.0, None)
            weights = newness * reach * reach
            rows = scaled / expected[:, None]
            normal = rows.T @ (rows * weights[:, None]) + pull
            theta = np.linalg.solve(normal, rows.T @ (weights * seconds / expected) + pull @ np.ones(4))
            theta = np.maximum(theta, 0.0)
        a, b, c, d = (float(value) for value in theta * prior)
        b = max(b, 1e-9)
        self.cost = PrefillCost(
            a, b, c, min(d, b)
        )  # bringing KV into place never costs more than computing it


def _fixed_s(features: Floats, seconds: Floats, newness: Floats, prior: Floats) -> float:
    """The fixed cost of a prefill, from which the fit starts.

    Long prompts say next to nothing of it, and once they have made up the model a short or cached one that takes much
    longer than it says looks like a stall. So it is read from quick prefills that are mostly fixed cost; the stall of a
    long one looks mostly fixed too, but is not quick.
    """
    rest = features[:, 1:] @ prior[1:]
    short = (rest < _MOSTLY * seconds) & (seconds <= _weighted_quantile(seconds, newness, _QUICK))
    if newness[short].sum() <= _PRIOR_WEIGHT:
        return float(prior[0])
    return _weighted_median((seconds - rest)[short], newness[short])


def _weighted_median(values: Floats, weights: Floats) -> float:
    return _weighted_quantile(values, weights, 0.5)


def _weighted_quantile(values: Floats, weights: Floats, share: float) -> float:
    order = np.argsort(values)
    total = np.cumsum(weights[order])
    return float(values[order][np.searchsorted(total, total[-1] * share)])
