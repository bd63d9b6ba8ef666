"""Opens the database of a store: an SQLite file of this host, or a PostgreSQL that several hosts share."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Self, TypeAlias

from mooncache.accounts.database_format import AccountDatabase, AccountStamp, DatabaseFormat

if TYPE_CHECKING:
    from mooncache.accounts.postgres import PostgresAccounts

AccountsPlace: TypeAlias = "Path | PostgresAccounts"
"""A folder of this host, or a database that several hosts share."""


class AccountStore:
    """A database that is open. Use as `with ... as store`; all methods of what derives from it block for a moment."""

    def __init__(self, place: AccountsPlace, form: DatabaseFormat, *, create: bool) -> None:
        """Raises ConfigInvalid; AccountsUnavailable when it is first asked."""
        self._database = open_database(place, form, create=create)

    @property
    def name(self) -> str:
        """What sentences call it."""
        return self._database.name

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Harmless to repeat."""
        self._database.close()


def open_database(place: AccountsPlace, form: DatabaseFormat, *, create: bool) -> AccountDatabase:
    """The database of a store; `create` makes a file that is missing. Raises ConfigInvalid."""
    if not isinstance(place, Path):
        return place.database(form)
    from mooncache.accounts.sqlite_file import SqliteFile

    return SqliteFile(place / form.file_name, form, create=create)


def exists(place: AccountsPlace, form: DatabaseFormat) -> bool:
    """Whether there is anything to open; a database of several hosts always has all stores."""
    return not isinstance(place, Path) or (place / form.file_name).exists()


def stamp_of(place: AccountsPlace, form: DatabaseFormat) -> AccountStamp | None:
    """What to compare to see whether something changed; None: there is nothing.

    Raises ConfigInvalid, AccountsUnavailable.
    """
    if not isinstance(place, Path):
        return place.stamp(form)
    from mooncache.accounts.sqlite_file import file_stamp

    return file_stamp(place / form.file_name, form)
