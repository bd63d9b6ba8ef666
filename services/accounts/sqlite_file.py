"""SQLite files of this host, for its operator's eyes only: how they are made, opened and refused.

The folder has mode 0700 and the files 0600. A file that others may read, of another program or of a newer version is
refused with a sentence. Whatever SQLite says becomes an error of the catalogue.
"""

from __future__ import annotations

import contextlib
import os
import sqlite3
import stat
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Final

from mooncache.accounts.database_format import AccountStamp, DatabaseFormat
from mooncache.errors import ConfigInvalid

BUSY_S: Final = 5.0
_MODE: Final = 0o600
_COUNTER_AT: Final = 24  # of the file's header: it counts transactions
_HEADER_BYTES: Final = 28


class SqliteFile:
    """A file that is open; an `AccountDatabase`. It may be used by several threads, by one at a time."""

    def __init__(self, path: Path, form: DatabaseFormat, *, create: bool) -> None:
        """Raises ConfigInvalid: the file is missing (and not to be made), wrong, or readable by others."""
        self.name = f"{form.what} {path}"
        _find(path, form.what, create=create)
        try:
            # A URI would let the path carry options. It commits by itself; transactions are begun explicitly.
            self._made = sqlite3.connect(path, timeout=BUSY_S, isolation_level=None, check_same_thread=False)
        except sqlite3.Error as error:
            raise ConfigInvalid(f"{self.name} cannot be opened: {error}.") from None
        try:
            with self._translated():
                self._made.execute("PRAGMA trusted_schema = OFF")
                self._made.execute("PRAGMA cell_size_check = ON")
                self._prepare(form)
        except BaseException:
            self._made.close()
            raise

    def ask(self, statement: str, values: Sequence[object] = ()) -> list[tuple[Any, ...]]:
        """Rows of a statement. Raises ConfigInvalid."""
        with self._translated():
            return self._made.execute(statement, values).fetchall()

    def ask_all(self, statement: str, rows: Iterable[Sequence[object]]) -> None:
        """Carry out a statement for each row. Raises ConfigInvalid."""
        with self._translated():
            self._made.executemany(statement, rows)

    @contextlib.contextmanager
    def transaction(self, *, changes: bool = False, rows: int = 0) -> Iterator[None]:
        """All or nothing, and alone: other writers wait up to BUSY_S. Raises ConfigInvalid."""
        with self._translated():
            self._made.execute("BEGIN IMMEDIATE")
            try:
                yield
                self._made.execute("COMMIT")
            except BaseException:
                if self._made.in_transaction:
                    self._made.execute("ROLLBACK")
                raise

    def close(self) -> None:
        """Harmless to repeat."""
        self._made.close()

    def _prepare(self, form: DatabaseFormat) -> None:
        version, number = self._pragma("user_version"), self._pragma("application_id")
        if not version and not number:
            self._made.execute(f"PRAGMA journal_mode = {form.journal}")
            with self.transaction():
                if not self._pragma("user_version"):  # another process may have been faster
                    for statement in form.schema.split(";"):
                        self._made.execute(statement)
                    self._made.execute(f"PRAGMA application_id = {form.number}")
                    self._made.execute(f"PRAGMA user_version = {form.version}")
            version, number = self._pragma("user_version"), self._pragma("application_id")
        if number != form.number:
            raise ConfigInvalid(f"{self.name} belongs to another program.")
        if version > form.version:
            raise ConfigInvalid(
                f"{self.name} is of version {version}; this program knows {form.version}. Use the newer program."
            )
        self._add_columns(form)

    def _add_columns(self, form: DatabaseFormat) -> None:
        """Those of `form.added` that the file lacks."""
        if all(self._has_column(table, name) for table, name, _ in form.added):
            return
        with self.transaction():
            for table, name, kind in form.added:
                if not self._has_column(table, name):  # another process may have been faster
                    self._made.execute(f"ALTER TABLE {table} ADD COLUMN {name} {kind}")

    def _has_column(self, table: str, name: str) -> bool:
        return any(row[1] == name for row in self._made.execute(f"PRAGMA table_info({table})"))

    def _pragma(self, name: str) -> int:
        return int(self._made.execute(f"PRAGMA {name}").fetchone()[0])

    @contextlib.contextmanager
    def _translated(self) -> Iterator[None]:
        try:
            yield
        except sqlite3.Error as error:
            raise ConfigInvalid(f"{self.name} cannot be used: {error}.") from None


def _find(path: Path, what: str, *, create: bool) -> None:
    """Make the file when it may be made, and check whose it is. Raises ConfigInvalid."""
    try:
        if create:
            for folder in (path.parent.parent, path.parent):  # the first may be the state folder
                folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            # Made here and not by SQLite, whose mode would be what the umask leaves.
            os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, _MODE))
        _check_private(path, what)
    except OSError as error:
        raise ConfigInvalid(f"{what} {path} cannot be opened: {error.strerror}.") from None


def _check_private(path: Path, what: str) -> None:
    status = path.stat()
    if not stat.S_ISREG(status.st_mode):
        raise ConfigInvalid(f"{what} {path} is not a regular file.")
    if status.st_mode & 0o077:
        mode = stat.S_IMODE(status.st_mode)
        raise ConfigInvalid(
            f"{what} {path} has mode {mode:04o}, so others may read it; run: chmod 600 {path}"
        )


def file_stamp(path: Path, form: DatabaseFormat) -> AccountStamp | None:
    """What to compare to see whether a file changed, without a lock; None: there is no file. Raises ConfigInvalid."""
    try:
        with path.open("rb") as opened:
            status, header = path.stat(), opened.read(_HEADER_BYTES)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise ConfigInvalid(f"{form.what} {path} cannot be read: {error.strerror}.") from None
    return status.st_ino, status.st_size, status.st_mtime_ns, header[_COUNTER_AT:]
