"""How long answers are: a distribution learnt from history, for each tenant and class of requests.

Counts in buckets that grow by the fourth root of two, each observation fading so that about the last `MEMORY` ones
count. A class that was seen seldom leans on the whole model's distribution, and that on a prior: a class with k
observations has weight k / (k + TRUST). From the counts follow the mean (an expectation bounded by what was asked
for) and the survival curve: the share of answers longer than so many tokens. Where Mooncache's paper lets every
decode last equally long (arXiv 2407.00079, section 7), this says when it will end.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Callable

import numpy as np

from mooncache.conductor.core.policy.types import Floats

MEMORY = 2000.0
TRUST = 8.0
CLASSES_MAX = 4096
_STEPS = 4  # buckets for each doubling
_BUCKETS = 22 * _STEPS
_EDGES = 2.0 ** (np.arange(_BUCKETS + 1) / _STEPS)  # of bucket i: from edge i to edge i + 1
_LOWEST = _EDGES.tolist()
_MIDDLES = (_EDGES[:-1] + _EDGES[1:]) / 2
_REFRESH = 32  # observations after which curves are made anew


class _Counts:
    """Fading counts of one class, and the shares that were made of them last.

    left: share of the answers that are longer than each edge, made when it is asked for.
    """

    __slots__ = ("counts", "left", "shares", "since", "total")

    def __init__(self) -> None:
        self.counts = np.zeros(_BUCKETS)
        self.total = 0.0
        self.since = _REFRESH
        self.shares = np.zeros(_BUCKETS)
        self.left: Floats | None = None

    def observe(self, tokens: float) -> None:
        fade = 1.0 - 1.0 / MEMORY
        if self.total >= MEMORY:
            self.counts *= fade
            self.total *= fade
        self.counts[_bucket(tokens)] += 1.0
        self.total += 1.0
        self.since += 1


def _bucket(tokens: float) -> int:
    return min(_BUCKETS - 1, bisect_right(_LOWEST, max(1.0, tokens)) - 1)


class OutputLengths:
    """Distributions of the length of one model's answers. prior_tokens: the mean before any observation."""

    def __init__(self, prior_tokens: float = 128.0) -> None:
        self.count = 0
        self._prior = _exponential(prior_tokens)
        self._all = _Counts()
        self._classes: OrderedDict[str, _Counts] = OrderedDict()

    def observe(self, name: str, tokens: float) -> None:
        """Take in the length of an answer of a class; impossible values are ignored."""
        if not 0 < tokens < 1e9:
            return
        self.count += 1
        self._all.observe(tokens)
        found = self._classes.get(name)
        if found is None:
            found = self._classes[name] = _Counts()
            if len(self._classes) > CLASSES_MAX:
                self._classes.popitem(last=False)
        found.observe(tokens)
        self._classes.move_to_end(name)

    def mean(self, name: str, limit: float = 0.0) -> float:
        """The expected length of an answer of the class, at most `limit` tokens (0: no limit)."""
        middles = np.minimum(_MIDDLES, limit) if limit > 0 else _MIDDLES
        return max(1.0, float(np.dot(self._counts(name).shares, middles)))

    def survival(self, name: str, limit: float = 0.0) -> Callable[[Floats], Floats]:
        """The function: tokens -> share of the class's answers that are longer."""
        counts = self._counts(name)
        if counts.left is None:
            counts.left = np.maximum(1.0 - np.concatenate(([0.0], np.cumsum(counts.shares))), 0.0)
        left = counts.left

        def longer(tokens: Floats) -> Floats:
            share: Floats = np.interp(tokens, _EDGES, left)
            if limit > 0:
                share = np.where(tokens < limit, share, 0.0)
            return share

        return longer

    def _counts(self, name: str) -> _Counts:
        """The counts of the class, or of all when it was never seen, with fresh shares."""
        whole = _blend(self._all, self._prior)
        found = self._classes.get(name)
        return _blend(found, whole.shares) if found is not None else whole


def _blend(counts: _Counts, prior: Floats) -> _Counts:
    """Make the class's shares anew, leaning on the prior as far as little was seen."""
    if counts.since >= _REFRESH or counts.total < _REFRESH:
        counts.shares = (counts.counts + TRUST * prior) / (counts.total + TRUST)
        counts.left = None
        counts.since = 0
    return counts


def _exponential(mean_tokens: float) -> Floats:
    left = np.exp(-(_EDGES - 1.0) / max(1.0, mean_tokens))
    shares: Floats = left[:-1] - left[1:]
    shares /= shares.sum()
    return shares
