"""Keeps what tenants and keys spent in this month where accounts are, which gateways share."""

from __future__ import annotations

import asyncio
from typing import Final

from mooncache.accounts.core.api_key import is_key_id
from mooncache.accounts.core.spending import LedgerRow, SpendingPart
from mooncache.accounts.core.usage import UsageCounts, WorkClass
from mooncache.accounts.database import AccountsPlace
from mooncache.accounts.months import month_of
from mooncache.accounts.spending_store import SpendingStore
from mooncache.gateway.core.holders import holder_of
from mooncache.gateway.core.tenant_slices import TenantSlices
from mooncache.gateway.shell.keyring import Caller
from mooncache.prices.core.price_book import MILLION, PriceBook
from mooncache.prices.core.usage_bill import money_of
from mooncache.runtime.clock import Clock

_PARTS: Final = (
    3  # of a flush: one that could not be written before, one of the month before, and what is new
)


class SpendingKeeper:
    """The money of one gateway. `writer` names this process' parts there; no other process has the same."""

    def __init__(
        self, place: AccountsPlace, writer: str, clock: Clock, book: PriceBook, limits: TenantSlices
    ) -> None:
        self._place, self._writer, self._clock = place, writer, clock
        self._book, self._limits = book, limits
        self._flushing = asyncio.Lock()

    @property
    def currency(self) -> str:
        """Of all amounts."""
        return self._book.cost.currency

    async def load(self) -> None:
        """Read what was spent in this month. Raises ConfigInvalid, AccountsUnavailable."""
        month = month_of(self._clock.wall_s())
        self._limits.spending.ledger, rows = await asyncio.to_thread(self._read, month)
        self._limits.begin_month(month, rows)

    def at_most(self, model: str, work_class: WorkClass, prompt_tokens: int, output_tokens: int) -> float:
        """What a request may cost: its whole prompt computed, and all that it may generate."""
        prices = self._book.token_prices(model, work_class)
        return (
            prompt_tokens * (prices.input_per_million or 0.0)
            + output_tokens * (prices.output_per_million or 0.0)
        ) / MILLION

    def spend(self, caller: Caller, model: str, work_class: WorkClass, counts: UsageCounts) -> None:
        """A request has ended. What has no price in the book costs nothing; neither do requests of operators."""
        if caller.admin:
            return
        amount = money_of(self._book, model, work_class, counts).total
        self._limits.spending.spend(caller.tenant, amount)
        if is_key_id(caller.key_id):
            self._limits.spending.spend(holder_of(caller.tenant, caller.key_id), amount)

    async def flush(self) -> None:
        """Write what is new, and begin a month. Raises ConfigInvalid, AccountsUnavailable; nothing is lost then."""
        spending = self._limits.spending
        async with self._flushing:
            month = month_of(self._clock.wall_s())
            if month > spending.month:
                _, rows = await asyncio.to_thread(self._read, month)
                self._limits.begin_month(month, rows)
            for _ in range(_PARTS):
                part = spending.next_part()
                if part is None:
                    break
                spending.written(part, await asyncio.to_thread(self._write, part))

    def _read(self, month: int) -> tuple[str, dict[str, LedgerRow]]:
        with SpendingStore(self._place, create=True) as store:
            return store.ledger(), store.of_month(month)

    def _write(self, part: SpendingPart) -> dict[str, LedgerRow]:
        # Opened each time: a file that was moved away or put back is found where it is. Connections are kept.
        with SpendingStore(self._place, create=True) as store:
            return store.add(self._writer, part, int(self._clock.wall_s()))
