"""What stores of accounts need of a database, of whichever kind.

Statements are those that SQLite and PostgreSQL both understand, with `?` for values. Whatever a database says becomes
an error of the catalogue.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

AccountStamp = tuple[int | str | bytes, ...]
"""Equal as long as nothing was written."""


@dataclass(frozen=True, slots=True)
class DatabaseFormat:
    """What a store holds. `what` begins sentences; `topic` names it in PostgreSQL.

    Of its file: `file_name`, `number` tells files of other programs apart, then version, schema and journal. `added`:
    columns that came later, as table, name and type with a default. A file that lacks one gets it when it is opened;
    programs of before go on beside it, so it has no new version.
    """

    what: str
    topic: str
    file_name: str
    number: int
    version: int
    schema: str
    journal: str = "DELETE"
    added: tuple[tuple[str, str, str], ...] = ()


class AccountDatabase(Protocol):
    """One store's view of its database. All methods block for a moment and raise ConfigInvalid, AccountsUnavailable."""

    @property
    def name(self) -> str:
        """What sentences call it."""

    def ask(self, statement: str, values: Sequence[object] = ()) -> list[tuple[Any, ...]]:
        """Rows of a statement; outside of a transaction it is one of its own."""

    def ask_all(self, statement: str, rows: Iterable[Sequence[object]]) -> None:
        """Carry out an `INSERT ... VALUES (?, ...)` for each row, within a transaction; no two have the same key."""

    def transaction(self, *, changes: bool = False, rows: int = 0) -> AbstractContextManager[None]:
        """All or nothing. `changes`: alone among those that change, and the stamp will be another one.

        rows: about how many it writes; more of them may take longer.
        """

    def close(self) -> None:
        """Harmless to repeat."""
