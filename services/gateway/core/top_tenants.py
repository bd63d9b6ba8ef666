"""Which tenants have series of their own in the metrics: those that use most lately, in a fixed number of seats.

Whoever comes while a seat is free takes it. Later, at each `turn`, a tenant without a seat that used more than one with
a seat takes it over. What is counted under OTHER stays there, so every series only grows.
"""

from __future__ import annotations

from typing import Final

from mooncache.accounts.core.usage import OTHER

SEATS_MAX: Final = 20
_RECENT_MAX: Final = 4096  # tenants whose use is compared at a turn


class TopTenants:
    """Seats. `label` before each count, `turn` once in a while."""

    def __init__(self, seats_max: int = SEATS_MAX) -> None:
        self._seats_max = seats_max
        self._seats: set[str] = set()
        self._recent: dict[str, int] = {}

    def label(self, tenant: str, tokens: int) -> str:
        """The name under which a tenant's tokens are counted now."""
        if tenant in self._recent or len(self._recent) < _RECENT_MAX:
            self._recent[tenant] = self._recent.get(tenant, 0) + tokens
        if tenant not in self._seats and len(self._seats) < self._seats_max:
            self._seats.add(tenant)
        return tenant if tenant in self._seats else OTHER

    def turn(self) -> list[str]:
        """Give seats to who used most since the last turn; the tenants that lost theirs."""
        recent, self._recent = self._recent, {}
        outside = sorted((used, name) for name, used in recent.items() if name not in self._seats)
        inside = sorted((recent.get(name, 0), name) for name in self._seats)
        lost = []
        for (used, tenant), (least, loser) in zip(reversed(outside), inside, strict=False):
            if used <= least:
                break
            self._seats.remove(loser)
            self._seats.add(tenant)
            lost.append(loser)
        return lost

    def check(self) -> None:
        """Raise AssertionError when an invariant is broken."""
        assert len(self._seats) <= self._seats_max, "too many seats"
        assert OTHER not in self._seats, "the others have a seat"
