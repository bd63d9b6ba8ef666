"""Calendar months in UTC, by which money is counted."""

from __future__ import annotations

from datetime import UTC, datetime


def month_of(wall_s: float) -> int:
    """The month of a moment (Unix seconds) as a number: 202611 is November 2026."""
    at = datetime.fromtimestamp(wall_s, UTC)
    return at.year * 100 + at.month


def next_month_s(wall_s: float) -> int:
    """When the next month begins, Unix seconds."""
    at = datetime.fromtimestamp(wall_s, UTC)
    year, month = divmod(at.year * 12 + at.month, 12)
    return int(datetime(year, month + 1, 1, tzinfo=UTC).timestamp())
