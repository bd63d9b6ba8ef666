"""Distributions of lengths, given by a few quantiles: what people know of their traffic, and what papers print."""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise
from statistics import NormalDist
from typing import TYPE_CHECKING

import numpy as np

from mooncache.errors import InvalidArgument

if TYPE_CHECKING:
    from numpy.typing import NDArray

_STEPS = 400


@dataclass(frozen=True, slots=True)
class Lengths:
    """Quantiles of a length in tokens: ((share, tokens), ...), both ascending; between two of them log-linear.

    The first share is 0 and the last 1: every distribution of lengths has an end.
    """

    points: tuple[tuple[float, float], ...]

    def __post_init__(self) -> None:
        shares = [share for share, _ in self.points]
        tokens = [length for _, length in self.points]
        ascending = all(a < b for a, b in pairwise(shares)) and tokens == sorted(tokens)
        if len(shares) < 2 or shares[0] != 0 or shares[-1] != 1 or not ascending:
            raise InvalidArgument(
                f"quantiles of a length ascend from share 0 to share 1 and so do their tokens: {self.points}"
            )
        if not all(1 <= length < math.inf for length in tokens):
            raise InvalidArgument(f"a length is between 1 and infinitely many tokens: {self.points}")

    @classmethod
    def lognormal(cls, mean_tokens: float, spread: float = 1.0, most_tokens: float = math.inf) -> Lengths:
        """A log-normal distribution of this mean; `spread` is the standard deviation of the logarithm (0 to 3)."""
        if not (1 <= mean_tokens < math.inf and 0 <= spread <= 3 and most_tokens >= 1):
            raise InvalidArgument(
                f"a log-normal length has a mean from 1 token (here {mean_tokens}) and a spread from 0 to 3 "
                f"(here {spread})"
            )
        middle = math.log(mean_tokens) - spread * spread / 2
        inner = NormalDist()
        shares = [step / _STEPS for step in range(1, _STEPS)]
        values = [math.exp(middle + spread * inner.inv_cdf(share)) for share in shares]
        values = [values[0], *values, math.exp(middle + spread * 3.1)]
        bounded = [max(1.0, min(value, most_tokens)) for value in values]
        return cls(tuple(zip((0.0, *shares, 1.0), bounded, strict=True)))

    def sample(self, count: int, draws: np.random.Generator) -> NDArray[np.int64]:
        """`count` independent lengths in whole tokens, at least 1."""
        shares, tokens = np.array(self.points).T
        values = np.exp(np.interp(draws.random(count), shares, np.log(tokens)))
        whole: NDArray[np.int64] = np.maximum(1, np.rint(values)).astype(np.int64)
        return whole

    def mean(self) -> float:
        """Mean length in tokens."""
        shares, tokens = np.array(self.points).T
        grid = np.linspace(0, 1, 20 * _STEPS + 1)
        return float(np.exp(np.interp((grid[1:] + grid[:-1]) / 2, shares, np.log(tokens))).mean())
