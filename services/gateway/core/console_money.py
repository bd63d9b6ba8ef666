"""What decisions cost and what caches saved of it, for the console, by the price book of `gateway.price_file`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, NamedTuple

from mooncache.prices.core.price_book import EngineHour, PriceBook
from mooncache.prices.core.request_cost import ENDED, price_of_request

_ENGINES_MAX: Final = 20_000


class DecisionCost(NamedTuple):
    """Money in the book's currency; `saved` None: not known."""

    total: float
    saved: float | None


class ConsoleMoney:
    """Prices records. `know` the instances first; those that have left stay known, since their records are."""

    def __init__(self, book: PriceBook) -> None:
        self.book = book
        self._engines: dict[str, EngineHour] = {}

    def know(self, engines: Mapping[str, EngineHour]) -> None:
        """Take the prices of instances in."""
        if len(self._engines) + len(engines) > _ENGINES_MAX:
            self._engines.clear()
        self._engines.update(engines)

    def price(self, record: Mapping[str, Any]) -> DecisionCost | None:
        """The cost of a record; None of one that has not ended, or that another version wrote differently."""
        if record.get("state") not in ENDED:
            return None
        try:
            cost = price_of_request(record, self.book, self._engines)
        except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError):
            return None
        return DecisionCost(cost.total, cost.saved.total if cost.saved is not None else None)
