"""What an hour of each registered instance costs."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from mooncache.kvcache.instance_messages import size_of
from mooncache.prices.core.price_book import EngineHour, PriceBook, PricedEngine


def engine_hours(instances: Iterable[Any], book: PriceBook) -> dict[str, EngineHour]:
    """The price of an hour of each instance, by name; instances: `pb.Instance` messages."""
    found = {}
    for instance in instances:
        size = size_of(instance)
        known = (size.processes, size.replicas) if size else ()
        found[instance.instance_id] = book.engine_hour(
            PricedEngine(instance.instance_id, instance.engine, *known)
        )
    return found
