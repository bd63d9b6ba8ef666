"""Reads sums of usage for those who may see them, a few at a time."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any, Final

from mooncache.accounts.core.usage import UsageField
from mooncache.accounts.database import AccountsPlace
from mooncache.accounts.usage_store import UsageStore, has_usage
from mooncache.errors import LimitExceeded
from mooncache.prices.core.price_book import PriceBook
from mooncache.prices.core.usage_bill import BilledSum, billed

ROWS_MAX: Final = 5_000
_READS_MAX: Final = 4


class UsageReader:
    """Sums from where accounts are. book: prices of tokens; None: no money."""

    def __init__(self, place: AccountsPlace, book: PriceBook | None) -> None:
        self._place, self.book = place, book
        self._reads = 0

    async def read(
        self, by: Sequence[UsageField], tenant: str | None, *, since_s: int, until_s: int = 1 << 62
    ) -> list[dict[str, Any]]:
        """A row for each value of `by`; tenant: only of this one.

        Raises:
            LimitExceeded: too many ask at this moment, or there are more than ROWS_MAX rows.
            ConfigInvalid, AccountsUnavailable: it cannot be read.
        """
        if self._reads >= _READS_MAX:
            raise LimitExceeded("Too many ask for usage at this moment; try again.")
        self._reads += 1
        try:
            rows = await asyncio.to_thread(self._read, tuple(by), tenant, since_s, until_s)
        finally:
            self._reads -= 1
        if len(rows) > ROWS_MAX:
            raise LimitExceeded(f"There are more than {ROWS_MAX} rows; ask for a shorter time.")
        return [self._described(by, row) for row in rows]

    def _read(
        self, by: tuple[UsageField, ...], tenant: str | None, since_s: int, until_s: int
    ) -> list[BilledSum]:
        if not has_usage(self._place):
            return []
        with UsageStore(self._place) as store:
            each_price = (*by, UsageField.MODEL, UsageField.CLASS)
            sums = store.sums(each_price, since_s=since_s, until_s=until_s, tenant=tenant)
        return billed(sums, self.book or PriceBook())

    def _described(self, by: Sequence[UsageField], row: BilledSum) -> dict[str, Any]:
        counts, money = row.counts, row.money
        found: dict[str, Any] = {str(field): value for field, value in zip(by, row.values, strict=True)}
        found |= {
            "requests": counts.requests,
            "failed": counts.failed,
            "cancelled": counts.cancelled,
            "input_tokens": counts.input_tokens,
            "cached_tokens": counts.cached_tokens,
            "output_tokens": counts.output_tokens,
            "estimated_tokens": counts.estimated_tokens,
        }
        if self.book is not None:
            found |= {"cost": money.total, "saved": money.saved, "unpriced_tokens": money.unpriced_tokens}
        return found
