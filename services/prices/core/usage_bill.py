"""What tenants pay for their usage, by the prices of tokens in a price book.

These are prices that an operator asks, not what tokens cost it: that is what `mooncache cost` says. Saved is what a
tenant's cached tokens would have cost more as computed ones.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from mooncache.accounts.core.usage import UsageCounts, UsageSum
from mooncache.prices.core.price_book import MILLION, PriceBook


@dataclass(slots=True)
class UsageMoney:
    """Money in the book's currency. `unpriced_tokens` have no price in the book and are in no sum."""

    input: float = 0.0
    """For input tokens that were computed."""
    cached: float = 0.0
    output: float = 0.0
    saved: float = 0.0
    unpriced_tokens: int = 0

    @property
    def total(self) -> float:
        """What is to be paid."""
        return self.input + self.cached + self.output

    def add(self, other: UsageMoney) -> None:
        """Add another's sums."""
        self.input += other.input
        self.cached += other.cached
        self.output += other.output
        self.saved += other.saved
        self.unpriced_tokens += other.unpriced_tokens


class BilledSum(NamedTuple):
    """A sum of usage with its price."""

    values: tuple[str | int, ...]
    counts: UsageCounts
    money: UsageMoney


def money_of(book: PriceBook, model: str, work_class: str, counts: UsageCounts) -> UsageMoney:
    """The price of counts of one model and class."""
    prices, money = book.token_prices(model, work_class), UsageMoney()
    for name, tokens, price in (
        ("input", counts.computed_tokens, prices.input_per_million),
        ("cached", counts.cached_tokens, prices.cached_per_million),
        ("output", counts.output_tokens, prices.output_per_million),
    ):
        if price is None:
            money.unpriced_tokens += tokens
        else:
            setattr(money, name, tokens * price / MILLION)
    if prices.input_per_million is not None and prices.cached_per_million is not None:
        money.saved = counts.cached_tokens * prices.input_per_million / MILLION - money.cached
    return money


def billed(sums: Iterable[UsageSum], book: PriceBook) -> list[BilledSum]:
    """Sums whose last two values are model and class, added up over these two and priced; the order stays."""
    found: dict[tuple[str | int, ...], BilledSum] = {}
    for row in sums:
        *values, model, work_class = row.values
        key = tuple(values)
        into = found.setdefault(key, BilledSum(key, UsageCounts(), UsageMoney()))
        into.counts.add(row.counts)
        into.money.add(money_of(book, str(model), str(work_class), row.counts))
    return list(found.values())
