"""What an hour of each registered instance costs."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from mooncache.kvcache.keys import passport_from_json
from mooncache.prices.core.price_book import EngineHour, PriceBook, PricedEngine


def engine_hours(instances: Iterable[Any], book: PriceBook) -> dict[str, EngineHour]:
    """The price of an hour of each instance, by name; instances: `pb.Instance` messages."""
    found = {}
    for instance in instances:
        ranks = None
        if instance.passport_json:
            passport = passport_from_json(instance.passport_json)
            ranks = max(1, passport.pp_size) * max(1, passport.tp_size)
        found[instance.instance_id] = book.engine_hour(
            PricedEngine(instance.instance_id, instance.engine, ranks)
        )
    return found
