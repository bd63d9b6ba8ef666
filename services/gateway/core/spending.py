"""What tenants and keys have spent in this month, as one gateway knows it.

Three amounts make up the sum. `own` is in the ledger of this gateway, a file of its host or a database of several,
`others` are other ledgers, and what was spent since the last write is here alone. A month has its own sums: with the
next one all begin at nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from mooncache.accounts.core.spending import HOLDERS_MAX, LedgerRow, SpendingPart

WARN_SHARE: Final = 0.8
"""Of a budget: a warning is due when so much of it is spent."""
_LEVELS: Final = (WARN_SHARE, 1.0)


@dataclass(slots=True)
class _Spent:
    own: float = 0.0
    others: float = 0.0
    reported: float = 0.0  # of own: what the conductor knows
    new: float = 0.0  # neither written nor in a part
    heard: float = 0.0  # of others: what was not written yet
    level: int = 0  # how many levels of its budget were passed


@dataclass(slots=True)
class Spending:
    """The sums of one month. `ledger` names the file of this host, "" before it was read."""

    month: int = 0
    ledger: str = ""
    _spent: dict[str, _Spent] = field(default_factory=dict)
    _changed: set[str] = field(default_factory=set)
    _late: dict[tuple[int, str], float] = field(default_factory=dict)
    _part: SpendingPart | None = None
    _sequence: int = 0

    def begin(self, month: int, rows: Mapping[str, LedgerRow]) -> None:
        """A month begins, or was read from the file. What was not written of the one before still will be."""
        for holder in self._changed:
            if (amount := self._spent[holder].new) > 0:
                self._late[self.month, holder] = self._late.get((self.month, holder), 0.0) + amount
        self._changed.clear()
        self._spent.clear()
        self.month = month
        for holder, row in rows.items():
            self._spent[holder] = _Spent(row.own, row.others)

    def spend(self, holder: str, amount: float) -> None:
        """Money was spent. Beyond HOLDERS_MAX holders further ones are not counted."""
        if holder not in self._spent and len(self._spent) >= HOLDERS_MAX:
            return
        if amount > 0:
            self._spent.setdefault(holder, _Spent()).new += amount
            self._changed.add(holder)

    def total(self, holder: str) -> float:
        """What was spent in this month over all gateways, as far as it is known here."""
        found = self._spent.get(holder)
        return 0.0 if found is None else found.own + found.others + self._unwritten(holder, found)

    def unwritten(self, holder: str) -> float:
        """What is not in the file of this host yet."""
        found = self._spent.get(holder)
        return 0.0 if found is None else self._unwritten(holder, found)

    def unreported(self, holder: str) -> float:
        """What the conductor does not know yet."""
        found = self._spent.get(holder)
        return 0.0 if found is None else found.own - found.reported + self._unwritten(holder, found)

    def reported(self, holder: str) -> float:
        """What all had spent when the conductor answered last."""
        found = self._spent.get(holder)
        return 0.0 if found is None else found.reported + found.others

    def row(self, holder: str) -> LedgerRow:
        """What the conductor hears of it."""
        found = self._spent.get(holder)
        return LedgerRow() if found is None else LedgerRow(found.own, found.others)

    def answered(self, holder: str, month: int, reported: float, all_spent: float) -> None:
        """The conductor knows that the ledger has `reported`, and all ledgers `all_spent`.

        Gateways that share the ledger may have added to it since it was read here.
        """
        others = all_spent - reported
        if month != self.month or (holder not in self._spent and others <= 0):
            return
        found = self._spent.setdefault(holder, _Spent())
        found.reported = max(found.reported, reported)
        found.own = max(found.own, reported)
        if others > found.others:
            found.others = found.heard = others
            self._changed.add(holder)

    def passed(self, holder: str, budget: float) -> float | None:
        """The share of a budget that was passed since the last question, WARN_SHARE or 1; None: no further one."""
        found = self._spent.get(holder)
        if found is None:
            return None
        level = sum(self.total(holder) >= share * budget for share in _LEVELS)
        before, found.level = found.level, level
        return _LEVELS[level - 1] if level > before else None

    def next_part(self) -> SpendingPart | None:
        """The part to write now: the last one again until `written` was called; None when there is nothing new."""
        if self._part is not None:
            return self._part
        if self._late:
            month = next(iter(self._late))[0]
            late = {holder: amount for (each, holder), amount in self._late.items() if each == month}
            rows = {holder: LedgerRow(amount, 0.0) for holder, amount in late.items()}
            for holder in late:
                del self._late[month, holder]
        elif self._changed:
            month, rows = self.month, {}
            for holder in self._changed:
                found = self._spent[holder]
                rows[holder] = LedgerRow(found.new, found.heard)
                found.new = found.heard = 0.0
            self._changed = set()
        else:
            return None
        self._sequence += 1
        self._part = SpendingPart(self._sequence, month, rows)
        return self._part

    def written(self, part: SpendingPart, rows: Mapping[str, LedgerRow]) -> None:
        """The part is in the file, where its holders have these rows now."""
        if self._part is not part:
            return
        self._part = None
        for holder, row in rows.items():
            if part.month == self.month and (found := self._spent.get(holder)) is not None:
                found.own, found.others = max(found.own, row.own), max(found.others, row.others)

    def _unwritten(self, holder: str, found: _Spent) -> float:
        part = self._part
        waits = 0.0 if part is None or part.month != self.month else part.rows.get(holder, LedgerRow()).own
        return found.new + waits
