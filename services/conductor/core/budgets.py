"""What was spent of budgets in the current month, over all gateways: the sum of the ledgers that gateways report.

A ledger is the file of one host, or the database of several; it only grows within a month, so a report that is late or
repeated changes nothing. Gateways that share a ledger know it as it was when they last wrote there, so each hears what
the others have reported of it: else it would take their part for that of another ledger, and count it twice.

Gateways also say what all ledgers have together at least, as they heard it. So a conductor that begins, or a host that
is gone, loses nothing that any gateway knows: what is not in a ledger that was named here is kept as `unnamed`.

Invariant: within a month the sum never falls, and is at least what any gateway has said.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Final, NamedTuple

MONTH_MAX: Final = 9999_12
LEDGERS_MAX: Final = 1024  # that are named; what others have is known as far as gateways heard of it
BudgetHolder = tuple[str, str]
"""Tenant and key; "" for the tenant's own budget."""


@dataclass(frozen=True, slots=True)
class Spent:
    """What a gateway says was spent: of its host's ledger, and at least over all."""

    month: int
    ledger: str
    own: float
    all: float


class SpentSum(NamedTuple):
    """What was spent in a month: over all, and of the ledger of the gateway that asks."""

    all: float
    own: float


NOTHING_SPENT: Final = SpentSum(0.0, 0.0)


@dataclass(slots=True)
class _Month:
    month: int
    ledgers: dict[str, float] = field(default_factory=dict)
    named: float = 0.0  # sum of the ledgers
    unnamed: float = 0.0


class Budgets:
    """Sums of the month, by holder. The one that was heard of longest ago is forgotten beyond `count_max`."""

    def __init__(self, count_max: int) -> None:
        self._count_max = count_max
        self._months: OrderedDict[BudgetHolder, _Month] = OrderedDict()

    def clear(self) -> None:
        """Know nothing; gateways tell what they know."""
        self._months.clear()

    def take(self, holder: BudgetHolder, said: Spent) -> SpentSum:
        """What a gateway says; returns what was spent over all, and of its ledger.

        One whose clock is behind is still in the month before, and hears what it said.
        """
        found = self._months.pop(holder, None)
        if found is None or said.month > found.month:
            found = _Month(said.month)
        self._months[holder] = found
        if len(self._months) > self._count_max:
            self._months.popitem(last=False)
        if said.month < found.month:
            return SpentSum(said.all, said.own)
        before = found.ledgers.get(said.ledger)
        if before is not None or len(found.ledgers) < LEDGERS_MAX:
            if before is None:
                found.unnamed = max(0.0, found.unnamed - said.own)
            grown = max(0.0, said.own - (before or 0.0))
            found.ledgers[said.ledger] = (before or 0.0) + grown
            found.named += grown
        own = found.ledgers.get(said.ledger, said.own)
        of_others = max(0.0, said.all - said.own)
        found.unnamed = max(found.unnamed, of_others - (found.named - own))
        return SpentSum(found.named + found.unnamed, own)
