"""What tenants and keys have spent in a month: gateways add to it and read it again.

Each database, a file of a host or one of several hosts, has a number of its own: it is a ledger. `own` is what the
gateways that share it added; `others` what they heard
that other ledgers have. Both only grow, so whoever reads an old value is wrong for a moment, never twice.

Each gateway adds numbered parts, and the database knows the last number of each: a part whose commit was in doubt is
written again without being added twice.
"""

from __future__ import annotations

import secrets
from typing import Final

import msgspec

from mooncache.accounts.core.spending import HOLDERS_MAX, LedgerRow, SpendingPart
from mooncache.accounts.database import AccountsPlace, AccountStore, exists
from mooncache.accounts.database_format import DatabaseFormat
from mooncache.accounts.parts import take_part
from mooncache.errors import ConfigInvalid

FILE_NAME: Final = "spending.sqlite"
YEAR_OF_MONTHS: Final = 100  # as months are numbered
_LEDGER_BYTES: Final = 8
_FORMAT: Final = DatabaseFormat(
    what="The file of spending",
    topic="spending",
    file_name=FILE_NAME,
    number=0x6D637370,  # "mcsp"
    version=1,
    schema="""CREATE TABLE spent (
        month INTEGER NOT NULL, holder TEXT NOT NULL, own REAL NOT NULL, others REAL NOT NULL,
        PRIMARY KEY (month, holder)
    ) STRICT, WITHOUT ROWID;
    CREATE TABLE spending_writer (id TEXT PRIMARY KEY, sequence INTEGER NOT NULL, written_s INTEGER NOT NULL) STRICT;
    CREATE TABLE ledger (id TEXT NOT NULL) STRICT""",
)
_ADD: Final = (
    "INSERT INTO spent (month, holder, own, others) VALUES (?, ?, ?, ?) ON CONFLICT (month, holder) DO UPDATE SET "
    "own = spent.own + excluded.own, "
    "others = CASE WHEN spent.others > excluded.others THEN spent.others ELSE excluded.others END"
)
_SpentRow = tuple[str, float, float]


class SpendingStore(AccountStore):
    """The spending of a place. Use it in a `with` statement; all methods block for a moment."""

    def __init__(self, place: AccountsPlace, *, create: bool = False) -> None:
        """Raises ConfigInvalid."""
        super().__init__(place, _FORMAT, create=create)

    def ledger(self) -> str:
        """The database's own number; a new one draws it."""
        with self._database.transaction(changes=True):
            rows = self._database.ask("SELECT id FROM ledger")
            if not rows:
                rows = [(secrets.token_hex(_LEDGER_BYTES),)]
                self._database.ask("INSERT INTO ledger (id) VALUES (?)", rows[0])
        return str(rows[0][0])

    def drawn_ledger(self) -> str:
        """The database's own number; "" while none was drawn."""
        rows = self._database.ask("SELECT id FROM ledger")
        return str(rows[0][0]) if rows else ""

    def add(self, writer: str, part: SpendingPart, now_s: int) -> dict[str, LedgerRow]:
        """Add a part of a gateway, on disk when this returns; what its holders have spent then.

        Raises ConfigInvalid, also for a full disk, and AccountsUnavailable; then it is written again.
        """
        ask = self._database.ask
        with self._database.transaction(rows=len(part.rows)):
            is_first, is_new = take_part(self._database, "spending_writer", writer, part.sequence, now_s)
            if is_first:
                ask("DELETE FROM spent WHERE month < ?", (part.month - YEAR_OF_MONTHS,))
            if is_new:
                rows = ((part.month, holder, *row) for holder, row in sorted(part.rows.items()))
                self._database.ask_all(_ADD, rows)
            return {
                holder: LedgerRow(*row)
                for holder in part.rows
                for row in ask(
                    "SELECT own, others FROM spent WHERE month = ? AND holder = ?", (part.month, holder)
                )
            }

    def of_month(self, month: int) -> dict[str, LedgerRow]:
        """What was spent in a month, by holder. Raises ConfigInvalid for a row that is no sum of money."""
        rows = self._database.ask(
            "SELECT holder, own, others FROM spent WHERE month = ? LIMIT ?", (month, HOLDERS_MAX)
        )
        try:
            found = [msgspec.convert(row, _SpentRow) for row in rows]
        except msgspec.ValidationError as error:
            raise ConfigInvalid(f"{self.name} has a row that is no sum of money: {error}.") from None
        return {holder: LedgerRow(own, others) for holder, own, others in found}


def has_spending(place: AccountsPlace) -> bool:
    """Whether there is a store of spending to open."""
    return exists(place, _FORMAT)
