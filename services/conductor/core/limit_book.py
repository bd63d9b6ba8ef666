"""Limits of tenants over all gateways: who may use how much of each until it asks again.

Each gateway admits requests by itself, out of a slice of the tenant's limit. It says several times a second what it
uses and would use, and hears its next slice. Slices follow demand: what is wanted is shared evenly where it is too
much, and of what is left each gets a part, so that a burst finds something, and a gateway that comes anew, too.

A limit on what is under way is divided as it is. A limit per minute is a bucket that fills evenly and holds one
minute's worth: slices are what may be spent, and what was spent is reported afterwards. Of money
what is divided is what core/budgets.py knows to be left of the month; a slice of it is what may be under way.

Invariant: what all gateways may use at any moment is not above the limit. A gateway uses the former slice until it has
heard of the next one, so the larger of the two counts until it says that it has. A gateway that is silent has lost its
slice after `LEASE_S`, by its own clock, which began earlier. A book that begins knows no slices: until those of before
have ended, each gateway keeps what it says to have, and gets no more (`begin`, `joined`).
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final

from mooncache.conductor.core.budgets import NOTHING_SPENT, Budgets, Spent, SpentSum
from mooncache.errors import InvalidArgument, LimitExceeded

LEASE_S: Final = 3.0
LIMITS_MAX: Final = 200_000
GATEWAYS_MAX: Final = 4096
LIMIT_MAX: Final = 1e15
_KEPT_S: Final = 120.0  # then every bucket is full again, but for what was spent beyond it
_FORGOTTEN_AT_ONCE: Final = 2  # of each report, so that no call has to forget many
_MINUTE_S: Final = 60.0
_ROUNDING: Final = 1e-6
_MONEY_UNITS: Final = 1e6  # in the whole limit


class LimitKind(StrEnum):
    """What a limit counts."""

    REQUESTS = "requests"
    TOKENS = "tokens"
    CONCURRENCY = "concurrency"
    TOKENS_UNDER_WAY = "tokens_under_way"
    MONEY = "money"

    @property
    def is_per_minute(self) -> bool:
        """Whether it is a bucket that fills, not a count of what is under way."""
        return self in (LimitKind.REQUESTS, LimitKind.TOKENS)


@dataclass(frozen=True, slots=True)
class LimitUse:
    """What a gateway says of one limit; the fields are those of the message `LimitUse`.

    `key_id` is set where the limit is one of a key beside its tenant's."""

    tenant: str
    kind: LimitKind
    limit: float
    slice: float = 0.0
    used: float = 0.0
    used_before: float = 0.0
    wanted: float = 0.0
    left: float | None = None
    key_id: str = ""
    spent: Spent | None = None  # of money

    @property
    def is_given_back(self) -> bool:
        """Whether the gateway has nothing of it, and wants nothing."""
        return not (self.slice or self.wanted or (self.used and not self.kind.is_per_minute))


@dataclass(frozen=True, slots=True)
class LimitLease:
    """What a gateway may use. `left`: of the whole limit, for refusals that say when to come back."""

    slice: float
    left: float
    spent: SpentSum = NOTHING_SPENT  # of money, in the month


@dataclass(slots=True)
class _Slice:
    limit: float
    used: float
    want: int  # in units
    committed: float  # the most that the gateway may use until it is heard again
    heard_s: float


@dataclass(slots=True)
class _Limit:
    total: float  # the limit; the smallest, when gateways differ, as they do while settings change
    level: float  # of a bucket: what is not spent, slices included
    filled_s: float
    heard_s: float
    slices: dict[str, _Slice] = field(default_factory=dict)

    def fill(self, now_s: float) -> None:
        passed_s, self.filled_s = max(0.0, now_s - self.filled_s), max(now_s, self.filled_s)
        self.level = min(self.total, self.level + passed_s * self.total / _MINUTE_S)

    def committed(self, but: str) -> float:
        return sum(each.committed for name, each in self.slices.items() if name != but)


class LimitBook:
    """The limits that are in use. Times are seconds of one monotonic clock."""

    def __init__(self, count_max: int = LIMITS_MAX) -> None:
        self._count_max = count_max
        self._limits: OrderedDict[tuple[str, str, LimitKind], _Limit] = (
            OrderedDict()
        )  # the longest unused first
        self._sequences: OrderedDict[str, int] = OrderedDict()
        self._settled_s = 0.0
        self._early = False
        self._whole: set[str] = set()
        self._budgets = Budgets(count_max)

    def __len__(self) -> int:
        return len(self._limits)

    def begin(self, now_s: float, *, knows_gateways: bool = False) -> None:
        """Another conductor may have given slices until this moment.

        knows_gateways: all of them; once they have reported what they have, it need not wait for the end of leases.
        """
        self._limits.clear()
        self._sequences.clear()
        self._whole.clear()
        self._budgets.clear()
        self._settled_s, self._early = now_s + LEASE_S, knows_gateways

    def joined(self, now_s: float) -> None:
        """There is a second gateway now. The first may have used all of every limit until it has reported what."""
        if now_s >= self._settled_s:
            self._settled_s, self._early = now_s + LEASE_S, True
            self._whole.clear()

    def reported_all(self, gateway_id: str, all_ids: Iterable[str]) -> None:
        """The gateway has named everything that it has; once all gateways have, no slice is unknown."""
        self._whole.add(gateway_id)
        if self._early and self._whole.issuperset(all_ids):
            self._settled_s = 0.0

    def open(self, gateway: str, sequence: int) -> None:
        """A call of a gateway's process. Raises InvalidArgument when a later one was here already."""
        if sequence <= self._sequences.pop(gateway, 0):
            raise InvalidArgument("A later request of this gateway has been answered already.")
        self._sequences[gateway] = sequence
        while len(self._sequences) > GATEWAYS_MAX:
            self._sequences.popitem(last=False)

    def lease(self, gateway: str, use: LimitUse, now_s: float) -> LimitLease:
        """Take what a gateway says, and give it its slice. Raises LimitExceeded for too many limits in use."""
        limit = self._limit(use, now_s)
        self._expire(limit, now_s)
        known = limit.slices.get(gateway)
        spent = 0.0
        if use.kind.is_per_minute:
            spent = max(0.0, use.used - (use.used_before if known is None else known.used))
            level = limit.level - spent
            limit.level = level if use.left is None else min(level, use.left)
        sums = NOTHING_SPENT if use.spent is None else self._budgets.take((use.tenant, use.key_id), use.spent)
        if use.is_given_back:
            limit.slices.pop(gateway, None)
            return LimitLease(0.0, self._left(limit, use, sums.all), sums)
        per_minute, unit = use.kind.is_per_minute, _unit(use)
        want = _units_up(use.wanted + (spent if per_minute else use.used), unit)
        committed = max(use.slice, 0.0 if per_minute else use.used)
        mine = limit.slices[gateway] = _Slice(use.limit, use.used, want, committed, now_s)
        limit.total = min(each.limit for each in limit.slices.values())
        limit.level = min(limit.level, limit.total)
        granted = self._grant(limit, gateway, limit.level if per_minute else limit.total - sums.all, unit)
        if now_s < self._settled_s:
            granted = min(granted, use.slice)
        mine.committed = max(mine.committed, granted)
        return LimitLease(granted, self._left(limit, use, sums.all), sums)

    def check(self) -> None:
        """Raise AssertionError when an invariant is broken."""
        assert len(self._limits) <= self._count_max, "more limits than are allowed"
        for limit in self._limits.values():
            assert all(each.committed >= 0 for each in limit.slices.values()), "a slice is negative"
            assert math.isfinite(limit.level), "a level is no number"

    def _limit(self, use: LimitUse, now_s: float) -> _Limit:
        key = use.tenant, use.key_id, use.kind
        limit = self._limits.get(key)
        if limit is None:
            self._make_room(now_s)
            limit = self._limits[key] = _Limit(use.limit, use.limit, now_s, now_s)
        self._limits.move_to_end(key)
        limit.heard_s = now_s
        return limit

    def _make_room(self, now_s: float) -> None:
        for _ in range(_FORGOTTEN_AT_ONCE):
            oldest = next(iter(self._limits.values()), None)
            full = len(self._limits) >= self._count_max
            if oldest is not None and now_s - oldest.heard_s > (LEASE_S if full else _KEPT_S):
                self._limits.popitem(last=False)
        if len(self._limits) >= self._count_max:
            raise LimitExceeded(f"{self._count_max} limits of tenants are in use, which is the most.")

    def _expire(self, limit: _Limit, now_s: float) -> None:
        """Slices of gateways that are silent end. What they might have spent counts as spent."""
        limit.fill(now_s)
        silent = [name for name, each in limit.slices.items() if now_s - each.heard_s >= LEASE_S]
        for name in silent:
            limit.level -= limit.slices.pop(name).committed

    @staticmethod
    def _grant(limit: _Limit, gateway: str, pot: float, unit: float) -> float:
        """The slice of one gateway out of the pot, which has the slices of all."""
        names = sorted(limit.slices)
        units = _units_down(pot, unit)
        shares = fair_shares(
            [limit.slices[name].want for name in names],
            units,
            [limit.slices[name].committed for name in names],
        )
        spare = (units - sum(shares)) // (len(names) + 1)  # one part for a gateway that comes anew
        free = _units_down(pot - limit.committed(but=gateway), unit)
        return min(shares[names.index(gateway)] + spare, free) * unit

    @staticmethod
    def _left(limit: _Limit, use: LimitUse, spent: float) -> float:
        if use.kind.is_per_minute:
            return limit.level
        return limit.total - spent - sum(each.used for each in limit.slices.values())


def fair_shares(wants: Sequence[int], total: int, committed: Sequence[float]) -> list[int]:
    """Each want, or an even share of the total where that is less; what some do not want is for the others.

    A total that cannot be divided evenly gives one more to those who have least, so that they take turns.
    """
    shares, left = [0] * len(wants), max(0, total)
    for rank, at in enumerate(sorted(range(len(wants)), key=wants.__getitem__)):
        shares[at] = min(wants[at], left // (len(wants) - rank))
        left -= shares[at]
    for at in sorted(range(len(wants)), key=committed.__getitem__):
        if left and shares[at] < wants[at]:
            shares[at], left = shares[at] + 1, left - 1
    return shares


def _unit(use: LimitUse) -> float:
    """What slices are multiples of. Money has no natural one."""
    return use.limit / _MONEY_UNITS if use.kind is LimitKind.MONEY else min(1.0, use.limit)


def _units_down(amount: float, unit: float) -> int:
    return max(0, math.floor(amount / unit + _ROUNDING))


def _units_up(amount: float, unit: float) -> int:
    return max(0, math.ceil(amount / unit - _ROUNDING))
