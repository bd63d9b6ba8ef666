"""Sums of what requests cost: of each tenant, per million tokens, and what the pool costs against what it saved.

Computing prompts is charged to input tokens, loading and storage to cached ones, generating to output tokens; the
three add up to the whole sum, as the prices of a plan do.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from mooncache.accounts.core.usage import WorkClass
from mooncache.prices.core.price_book import HOUR_S, HOURS_PER_MONTH, PriceBook, per_million
from mooncache.prices.core.request_cost import RequestCost

GB: Final = 1e9


@dataclass(frozen=True, slots=True)
class StoredBytes:
    """Bytes of the pool: those that a tenant holds, or those that all nodes have."""

    memory_bytes: float = 0.0
    disk_bytes: float = 0.0

    def per_hour(self, book: PriceBook) -> float:
        """Price of holding them for an hour."""
        return self.memory_per_hour(book) + self.disk_bytes / GB * (book.ssd_gb_hour or 0.0)

    def memory_per_hour(self, book: PriceBook) -> float:
        """The part of memory."""
        return self.memory_bytes / GB * (book.dram_gb_hour or 0.0)


@dataclass(frozen=True, slots=True)
class CostSum:
    """Sums over requests of one tenant, or of all; money, tokens and seconds."""

    requests: int
    input_tokens: int
    cached_tokens: int
    output_tokens: int
    prefill: float
    decode: float
    network: float
    storage: float
    saved_engine: float
    saved_dram: float
    saved_ssd: float
    saved_s: float
    saved_unknown: int  # requests of which it is not known what caches saved

    @property
    def total(self) -> float:
        return self.prefill + self.decode + self.network + self.storage

    @property
    def saved(self) -> float:
        return self.saved_engine + self.saved_dram + self.saved_ssd

    @property
    def per_million_input(self) -> float | None:
        """Price of a million computed prompt tokens; None without any."""
        return per_million(self.prefill, self.input_tokens)

    @property
    def per_million_cached(self) -> float | None:
        """Price of a million cached prompt tokens."""
        return per_million(self.network + self.storage, self.cached_tokens)

    @property
    def per_million_output(self) -> float | None:
        """Price of a million output tokens."""
        return per_million(self.decode, self.output_tokens)

    @property
    def per_million_tokens(self) -> float | None:
        """Price of a million tokens of any kind: the whole sum over all of them."""
        return per_million(self.total, self.input_tokens + self.cached_tokens + self.output_tokens)


def sum_of(costs: Sequence[RequestCost], storage: float = 0.0) -> CostSum:
    """The sum of these requests. storage: price of what is stored over the same time."""
    known = [cost.saved for cost in costs if cost.saved is not None]
    return CostSum(
        requests=len(costs),
        input_tokens=sum(cost.input_tokens for cost in costs),
        cached_tokens=sum(cost.cached_tokens for cost in costs),
        output_tokens=sum(cost.output_tokens for cost in costs),
        prefill=math.fsum(cost.prefill for cost in costs),
        decode=math.fsum(cost.decode for cost in costs),
        network=math.fsum(cost.network for cost in costs),
        storage=storage,
        saved_engine=math.fsum(saved.engine for saved in known),
        saved_dram=math.fsum(saved.dram for saved in known),
        saved_ssd=math.fsum(saved.ssd for saved in known),
        saved_s=math.fsum(cost.saved_s for cost in costs if cost.saved_s is not None),
        saved_unknown=len(costs) - len(known),
    )


def by_tenant(
    costs: Iterable[RequestCost], stored: Mapping[str, StoredBytes], hours: float, book: PriceBook
) -> dict[str, CostSum]:
    """The sums of each tenant that asked or stores something, the dearest first."""
    groups: dict[str, list[RequestCost]] = {
        name: [] for name, size in stored.items() if size.memory_bytes or size.disk_bytes
    }
    for cost in costs:
        groups.setdefault(cost.tenant, []).append(cost)
    sums = {
        name: sum_of(group, stored.get(name, StoredBytes()).per_hour(book) * hours)
        for name, group in groups.items()
    }
    return dict(sorted(sums.items(), key=lambda item: (-item[1].total, item[0])))


def by_class(costs: Sequence[RequestCost], storage: float = 0.0) -> dict[WorkClass, CostSum]:
    """The sums of online and offline requests, of each class that has some.

    storage: price of what is stored over the same time. It is divided by the tokens that came from caches, so that both
    classes pay the same for them; without such tokens by those of prompts. The sums add up to that of all requests.
    """
    groups = {each: [cost for cost in costs if cost.work_class is each] for each in WorkClass}
    cached = {each: sum(cost.cached_tokens for cost in group) for each, group in groups.items()}
    if not any(cached.values()):
        cached = {each: sum(cost.input_tokens for cost in group) for each, group in groups.items()}
    if not any(cached.values()):
        cached = {each: len(group) for each, group in groups.items()}
    tokens = max(1, sum(cached.values()))
    return {each: sum_of(group, storage * cached[each] / tokens) for each, group in groups.items() if group}


@dataclass(frozen=True, slots=True)
class Payback:
    """What one kind of the pool's space costs a month, and what it saves when every hour is like those seen."""

    kind: str  # dram or ssd
    size_bytes: float
    cost_per_month: float
    saved_per_month: float

    @property
    def ratio(self) -> float | None:
        """Saved over cost; None when the space costs nothing."""
        return self.saved_per_month / self.cost_per_month if self.cost_per_month else None


def paybacks(capacity: StoredBytes, total: CostSum, hours: float, book: PriceBook) -> list[Payback]:
    """The payback of memory and of disks, where there are some and they have a price. hours: of the window, above 0."""
    rows = (
        ("dram", capacity.memory_bytes, book.dram_gb_hour, total.saved_dram),
        ("ssd", capacity.disk_bytes, book.ssd_gb_hour, total.saved_ssd),
    )
    return [
        Payback(kind, size, size / GB * price * HOURS_PER_MONTH, saved / hours * HOURS_PER_MONTH)
        for kind, size, price, saved in rows
        if size > 0 and price is not None
    ]


@dataclass(frozen=True, slots=True)
class Played:
    """What the simulator said of one size of memory."""

    factor: float
    memory_bytes: float
    span_s: float
    hit_ratio: float
    prefill_s: float  # seconds of instances that computed prompts


@dataclass(frozen=True, slots=True)
class WhatIf:
    """One size of memory against the present one, per month; `saved` less `cost` is what is gained."""

    played: Played
    cost_per_month: float  # of the memory that was added; negative when some was taken away
    saved_per_month: float  # time of engines that is no longer needed

    @property
    def gain_per_month(self) -> float:
        return self.saved_per_month - self.cost_per_month


def what_if(now: Played, other: Played, dram_gb_hour: float, engine_hour: float) -> WhatIf:
    """Another size of memory, priced; the trace's span is taken for every hour of a month."""
    hours = now.span_s / HOUR_S
    added = (other.memory_bytes - now.memory_bytes) / GB * dram_gb_hour * HOURS_PER_MONTH
    saved_s = now.prefill_s - other.prefill_s
    return WhatIf(other, added, saved_s / HOUR_S * engine_hour / hours * HOURS_PER_MONTH if hours else 0.0)
