"""Who uses more than a fair share: tokens computed for each tenant lately.

Tokens that were cached cost little, so what counts is what had to be computed. Each tenant's sum fades with a time
constant; the fair share is the mean over the tenants that were active lately. A policy sees the ratio, 1.0 when a
tenant has its share or less than two tenants are there. Who left is forgotten when a twentieth of the mean is left
of its sum, after three minutes if it used its share; a tenant that used ten times as much is remembered for five.
"""

from __future__ import annotations

import math
from collections import OrderedDict

FADES_IN_S = 60.0
TENANTS_MAX = 10_000
FORGOTTEN = 0.05  # of the mean: who left counts as active for three time constants, not longer


class FairShares:
    """Each tenant's recently computed tokens over its fair share. Times are seconds of one monotonic clock."""

    def __init__(self) -> None:
        self._used: OrderedDict[str, tuple[float, float]] = OrderedDict()  # tenant -> (tokens, as of)
        self._sum = 0.0
        self._sum_s = 0.0

    def use(self, tenant: str, tokens: float, now_s: float) -> None:
        """Count tokens that are computed for a tenant."""
        used = self._of(tenant, now_s) + tokens
        self._sum = self._faded(self._sum, self._sum_s, now_s) + tokens
        self._sum_s = now_s
        self._used[tenant] = (used, now_s)
        self._used.move_to_end(tenant)
        while self._used:
            oldest, (tokens_then, then_s) = next(iter(self._used.items()))
            faded = self._faded(tokens_then, then_s, now_s)
            if len(self._used) <= TENANTS_MAX and faded > FORGOTTEN * self._sum / len(self._used):
                break
            if oldest == tenant:
                break
            del self._used[oldest]
            self._sum = max(0.0, self._sum - faded)

    def share(self, tenant: str, now_s: float) -> float:
        """The tenant's use over the mean use of the active tenants, at least 1.0."""
        if len(self._used) < 2:
            return 1.0
        mean = self._faded(self._sum, self._sum_s, now_s) / len(self._used)
        return max(1.0, self._of(tenant, now_s) / mean) if mean > 0 else 1.0

    def _of(self, tenant: str, now_s: float) -> float:
        tokens, then_s = self._used.get(tenant, (0.0, now_s))
        return self._faded(tokens, then_s, now_s)

    @staticmethod
    def _faded(tokens: float, then_s: float, now_s: float) -> float:
        return tokens * math.exp(-max(0.0, now_s - then_s) / FADES_IN_S)
