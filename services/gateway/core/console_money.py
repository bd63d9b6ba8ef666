"""What decisions cost and what caches saved of it, for the console, by the price book of `gateway.price_file`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, replace
from typing import Any, Final, NamedTuple

from mooncache.prices.core.cost_sums import StoredBytes, paybacks, sum_of
from mooncache.prices.core.price_book import HOUR_S, EngineHour, PriceBook
from mooncache.prices.core.request_cost import ENDED, RequestCost, price_of_request

_ENGINES_MAX: Final = 20_000
_NOT_MEMORY: Final = frozenset({"hbm", "disk"})
"""Tiers in rows of nodes: what machines of engines pay for, and what lies on disks."""


class DecisionCost(NamedTuple):
    """Money in the book's currency; `saved` None: not known. Parts of it: by memory of the pool, by its disks."""

    total: float
    saved: float | None
    saved_dram: float | None
    saved_ssd: float | None


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
        cost = self._cost(record)
        if cost is None:
            return None
        saved = cost.saved
        if saved is None:
            return DecisionCost(cost.total, None, None, None)
        return DecisionCost(cost.total, saved.total, saved.dram, saved.ssd)

    def described(self, record: Mapping[str, Any]) -> dict[str, Any] | None:
        """The cost of a record in parts, as `mooncache why` says them; None as of `price`."""
        cost = self._cost(record)
        if cost is None:
            return None
        return {
            "currency": self.book.cost.currency,
            "total": cost.total,
            "computing": cost.prefill,
            "generating": cost.decode,
            "network": cost.network,
            "saved": asdict(cost.saved) | {"total": cost.saved.total} if cost.saved is not None else None,
            "remarks": [*cost.gaps, *cost.estimates, *self.book.holes()],
        }

    def paybacks(
        self, nodes: Iterable[Mapping[str, Any]], saved_dram: float, saved_ssd: float, window_s: float
    ) -> list[dict[str, Any]]:
        """Whether memory and disks of the pool pay for themselves, if every hour is like this window.

        nodes: rows of the page of the pool. saved_dram, saved_ssd: money of the window. window_s: above 0.
        """
        memory = disk = 0.0
        for node in nodes:
            for tier in node["tiers"]:
                memory += 0 if tier["tier"] in _NOT_MEMORY else tier["capacity_bytes"]
                disk += tier["used_bytes"] if tier["tier"] == "disk" else 0
        total = replace(sum_of(()), saved_dram=saved_dram, saved_ssd=saved_ssd)
        found = paybacks(StoredBytes(memory, disk), total, window_s / HOUR_S, self.book)
        return [asdict(row) | {"ratio": row.ratio} for row in found]

    def _cost(self, record: Mapping[str, Any]) -> RequestCost | None:
        if record.get("state") not in ENDED:
            return None
        try:
            return price_of_request(record, self.book, self._engines)
        except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError):
            return None
