"""Sums of usage since the gateway's start, by tenant and model: what an exporter of metrics shows.

A series only grows, and none is taken away while the gateway runs, so what receives it may take differences. The number
of series is bounded; whoever comes later is counted under OTHER.
"""

from __future__ import annotations

from typing import Final, NamedTuple

from mooncache.accounts.core.usage import OTHER, UsageCounts

SERIES_MAX: Final = 600
"""Three outcomes each stay below the 2,000 combinations of attributes that OpenTelemetry's SDK keeps apart."""


class UsageTotal(NamedTuple):
    """Sums of one tenant and model. `cached` is among `input`; `money` is in the currency of the price book."""

    answered: int = 0
    failed: int = 0
    cancelled: int = 0
    input: int = 0
    cached: int = 0
    output: int = 0
    estimated: int = 0
    money: float = 0.0


class UsageSeries:
    """The sums of one gateway. `add` in its loop; `rows` in any thread."""

    def __init__(self, series_max: int = SERIES_MAX) -> None:
        self._series_max = series_max
        self._totals: dict[tuple[str, str], UsageTotal] = {}

    def add(self, tenant: str, model: str, counts: UsageCounts, money: float) -> None:
        """One request has ended."""
        key = (tenant, model)
        if key not in self._totals and len(self._totals) >= self._series_max - 1:
            key = (OTHER, OTHER)
        was = self._totals.get(key, UsageTotal())
        # A total is replaced as a whole: another thread sees the one before or the one after.
        self._totals[key] = UsageTotal(
            was.answered + counts.requests - counts.failed - counts.cancelled,
            was.failed + counts.failed,
            was.cancelled + counts.cancelled,
            was.input + counts.input_tokens,
            was.cached + counts.cached_tokens,
            was.output + counts.output_tokens,
            was.estimated + counts.estimated_tokens,
            was.money + money,
        )

    def rows(self) -> dict[tuple[str, str], UsageTotal]:
        """All sums now, by tenant and model."""
        return self._totals.copy()

    def check(self) -> None:
        """Raise AssertionError when an invariant is broken."""
        assert len(self._totals) <= self._series_max, "too many series"
        assert all(total.cached <= total.input for total in self._totals.values()), "more cached than input"
