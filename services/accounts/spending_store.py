"""What tenants and keys have spent in a month, in an SQLite file of this host: gateways add to it and read it again.

The file has a number of its own, the ledger. `own` is what the gateways of this host added; `others` what they heard
that other ledgers have. Both only grow, so whoever reads an old value is wrong for a moment, never twice.

Each gateway adds numbered parts, and the file knows the last number of each: a part whose commit was in doubt is
written again without being added twice.
"""

from __future__ import annotations

import secrets
from pathlib import Path
from typing import Final

import msgspec

from mooncache.accounts.core.spending import HOLDERS_MAX, LedgerRow, SpendingPart
from mooncache.accounts.database import AccountFile, DatabaseFormat, transaction, translated
from mooncache.errors import ConfigInvalid

FILE_NAME: Final = "spending.sqlite"
YEAR_OF_MONTHS: Final = 100  # as months are numbered
_WRITER_KEPT_S: Final = 7 * 86_400  # a part is repeated within seconds of its first try
_LEDGER_BYTES: Final = 8
_WHAT: Final = "The file of spending"
_FORMAT: Final = DatabaseFormat(
    what=_WHAT,
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
    "INSERT INTO spent (month, holder, own, others) VALUES (?, ?, ?, ?) ON CONFLICT DO UPDATE SET "
    "own = own + excluded.own, others = max(others, excluded.others)"
)
_SpentRow = tuple[str, float, float]


class SpendingStore(AccountFile):
    """The file of spending in a folder. Use it in a `with` statement; all methods block for a moment."""

    def __init__(self, folder: Path, *, create: bool = False) -> None:
        """Raises ConfigInvalid."""
        super().__init__(folder / FILE_NAME, _FORMAT, create=create)

    def ledger(self) -> str:
        """The file's own number; a new file draws one."""
        with transaction(self._database, self.path, _WHAT):
            rows = self._database.execute("SELECT id FROM ledger").fetchall()
            if not rows:
                rows = [(secrets.token_hex(_LEDGER_BYTES),)]
                self._database.execute("INSERT INTO ledger (id) VALUES (?)", rows[0])
        return str(rows[0][0])

    def add(self, writer: str, part: SpendingPart, now_s: int) -> dict[str, LedgerRow]:
        """Add a part of a gateway, on disk when this returns; what its holders have spent then.

        Raises ConfigInvalid, also for a full disk; then nothing of the part was added.
        """
        ask = self._database.execute
        with transaction(self._database, self.path, _WHAT):
            rows = ask("SELECT sequence FROM spending_writer WHERE id = ?", (writer,)).fetchall()
            if not rows or rows[0][0] < part.sequence:
                if not rows:
                    ask("DELETE FROM spent WHERE month < ?", (part.month - YEAR_OF_MONTHS,))
                    ask("DELETE FROM spending_writer WHERE written_s < ?", (now_s - _WRITER_KEPT_S,))
                ask(
                    "INSERT INTO spending_writer (id, sequence, written_s) VALUES (?, ?, ?) ON CONFLICT DO UPDATE SET "
                    "sequence = excluded.sequence, written_s = excluded.written_s",
                    (writer, part.sequence, now_s),
                )
                values = [(part.month, holder, *row) for holder, row in part.rows.items()]
                self._database.executemany(_ADD, values)
            return {
                holder: LedgerRow(*row)
                for holder in part.rows
                for row in ask(
                    "SELECT own, others FROM spent WHERE month = ? AND holder = ?", (part.month, holder)
                )
            }

    def of_month(self, month: int) -> dict[str, LedgerRow]:
        """What was spent in a month, by holder. Raises ConfigInvalid for a row that is no sum of money."""
        with translated(self.path, _WHAT):
            rows = self._database.execute(
                "SELECT holder, own, others FROM spent WHERE month = ? LIMIT ?", (month, HOLDERS_MAX)
            ).fetchall()
        try:
            found = [msgspec.convert(row, _SpentRow) for row in rows]
        except msgspec.ValidationError as error:
            raise ConfigInvalid(f"{_WHAT} {self.path} has a row that is no sum of money: {error}.") from None
        return {holder: LedgerRow(own, others) for holder, own, others in found}
