"""What holders of budgets have spent in a month, as files and gateways hand it on. A month is a number: 202611."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, NamedTuple

HOLDERS_MAX: Final = 200_000


class LedgerRow(NamedTuple):
    """Money in the price book's currency: of this host's gateways, and of all others as they were heard of."""

    own: float = 0.0
    others: float = 0.0


class SpendingPart(NamedTuple):
    """Money on its way to the file, of one month. `sequence` rises by one with each part of a gateway."""

    sequence: int
    month: int
    rows: Mapping[str, LedgerRow]
    """By holder: what is added to `own`, and what is known of `others`."""
