"""What `mooncache cost` and `mooncache why` say of money, in words: two digits, in the price book's currency."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Final

from mooncache.accounts.core.usage import WorkClass

if TYPE_CHECKING:
    from mooncache.prices.core.cost_sums import CostSum, Payback, WhatIf
    from mooncache.prices.core.price_book import PriceBook
    from mooncache.prices.core.request_cost import RequestCost

_DIGITS: Final = 2
TENANTS_MAX: Final = 20  # rows of the table
TENANT_COLUMNS: Final = (
    "tenant",
    "requests*",
    "input*",
    "cached*",
    "output*",
    "computing*",
    "generating*",
    "network*",
    "storage*",
    "sum*",
    "saved*",
)
NOT_SEEN: Final = (
    "not seen: idle engines, master, conductor, gateways, power and people; requests that were refused, failed over "
    "to another plan, or went round the conductor"
)
ASSUMED: Final = (
    "assumed: saved is against the time that the conductor's cost model gave for the whole prompt",
    "assumed: a request takes its share of the decode batch as it was when it was scheduled; waits take no engine",
    "assumed: bytes loaded within a host cost like those between hosts; bytes written to the pool cost nothing",
)


def money(value: float | None) -> str:
    """Two significant digits without an exponent: 0.000012, 3.4, 1,200. None: -."""
    if value is None or not math.isfinite(value):
        return "-"
    if value == 0:
        return "0"
    places = _DIGITS - 1 - math.floor(math.log10(abs(value)))
    text = f"{round(value, places):,.{max(0, min(places, 12))}f}"
    return "0" if not text.strip("-0.") else text


def tenant_rows(tenants: Mapping[str, CostSum], total: CostSum) -> list[tuple[str, ...]]:
    """The dearest tenants, and the sum of all."""
    rows = [_row(name or "(none)", part) for name, part in list(tenants.items())[:TENANTS_MAX]]
    return [*rows, _row("all", total)] if len(tenants) != 1 else rows


def _row(name: str, part: CostSum) -> tuple[str, ...]:
    counts = (part.requests, part.input_tokens, part.cached_tokens, part.output_tokens)
    prices = (part.prefill, part.decode, part.network, part.storage, part.total, part.saved)
    return (name, *(f"{count:,}" for count in counts), *(money(price) for price in prices))


CLASS_COLUMNS: Final = (
    "class",
    "requests*",
    "sum*",
    "a million input*",
    "cached*",
    "output*",
    "of any kind*",
)


def class_rows(classes: Mapping[WorkClass, CostSum]) -> list[tuple[str, ...]]:
    """Online and offline requests side by side; nothing where all are of one class, which the other table has."""
    if len(classes) < 2:
        return []
    return [
        (
            str(each),
            f"{part.requests:,}",
            money(part.total),
            money(part.per_million_input),
            money(part.per_million_cached),
            money(part.per_million_output),
            money(part.per_million_tokens),
        )
        for each, part in classes.items()
    ]


def per_million_line(total: CostSum, currency: str) -> str:
    """The three prices of tokens, and that of all of them."""
    return (
        f"a million tokens: input {money(total.per_million_input)}, cached {money(total.per_million_cached)}, "
        f"output {money(total.per_million_output)}, of any kind {money(total.per_million_tokens)} {currency}"
    )


def saved_line(total: CostSum, currency: str) -> str:
    """What caches saved, and in which of them."""
    unknown = f"; not known of {total.saved_unknown:,} requests" if total.saved_unknown else ""
    return (
        f"caches saved {money(total.saved)} {currency} ({money(total.saved_s / 3600)} hours of engines): "
        f"engines' own {money(total.saved_engine)}, memory of the pool {money(total.saved_dram)}, "
        f"its disks {money(total.saved_ssd)}{unknown}"
    )


def payback_line(row: Payback, window: str, currency: str) -> str:
    """Whether space of the pool pays for itself, and that this is extrapolated."""
    size = f"{money(row.size_bytes / 1e9)} GB of {row.kind}"
    if row.ratio is None:
        return f"{size} cost nothing of their own: the price of the machines covers them"
    return (
        f"{size} cost {money(row.cost_per_month)} {currency} a month and save {money(row.saved_per_month)} "
        f"({money(row.ratio)} times their price), if every hour is like the last {window}"
    )


def what_if_rows(rows: Iterable[WhatIf]) -> list[tuple[str, ...]]:
    """One row for each size of memory."""
    return [
        (
            f"{row.played.factor:g}x",
            money(row.played.memory_bytes / 1e9),
            f"{row.played.hit_ratio:.0%}",
            money(row.cost_per_month),
            money(row.saved_per_month),
            money(row.gain_per_month),
        )
        for row in rows
    ]


WHAT_IF_COLUMNS: Final = ("memory", "GB*", "hit ratio*", "costs more*", "saves*", "gain*")


def request_line(cost: RequestCost, book: PriceBook, *, made_up: bool) -> str:
    """What one request cost, what caches saved of it, and what is not counted."""
    known = f"caches saved {money(cost.saved.total)}" if cost.saved is not None else ""
    saved = known or "what caches saved is not known"
    prices = " at made-up example prices" if made_up else ""
    offline = ", offline" if cost.work_class is WorkClass.OFFLINE else ""
    line = (
        f"cost about {money(cost.total)} {book.cost.currency}{prices}{offline}: computing {money(cost.prefill)}, "
        f"generating {money(cost.decode)}, network {money(cost.network)}; {saved}"
    )
    remarks = [*cost.gaps, *cost.estimates, *book.holes()]
    return line + (f" ({'; '.join(remarks)})" if remarks else "")
