"""SQLite files of this host, for its operator's eyes only: how they are made, opened and refused.

The folder has mode 0700 and the files 0600. A file that others may read, of another program or of a newer version is
refused with a sentence. Whatever SQLite says becomes an error of the catalogue.
"""

from __future__ import annotations

import contextlib
import os
import sqlite3
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Self

from mooncache.errors import ConfigInvalid

BUSY_S: Final = 5.0
_MODE: Final = 0o600


@dataclass(frozen=True, slots=True)
class DatabaseFormat:
    """What a file holds. `what` begins sentences; `number` tells files of other programs apart."""

    what: str
    number: int
    version: int
    schema: str
    journal: str = "DELETE"


class AccountFile:
    """A file that is open. Use as `with ... as store`; all methods of what derives from it block for a moment."""

    def __init__(self, path: Path, form: DatabaseFormat, *, create: bool) -> None:
        """Raises ConfigInvalid."""
        self.path = path
        self._database = open_database(path, form, create=create)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Harmless to repeat."""
        self._database.close()


def open_database(path: Path, form: DatabaseFormat, *, create: bool) -> sqlite3.Connection:
    """A connection that commits by itself; transactions are begun explicitly.

    It may be used by another thread than the one that opened it, one at a time.

    Raises:
        ConfigInvalid: the file is missing (and not to be made), wrong, or readable by others.
    """
    try:
        if create:
            for folder in (path.parent.parent, path.parent):  # the first may be the state folder
                folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            # Made here and not by SQLite, whose mode would be what the umask leaves.
            os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, _MODE))
        _check_private(path, form.what)
    except OSError as error:
        raise ConfigInvalid(f"{form.what} {path} cannot be opened: {error.strerror}.") from None
    try:
        # A URI would let the path carry options.
        made = sqlite3.connect(path, timeout=BUSY_S, isolation_level=None, check_same_thread=False)
    except sqlite3.Error as error:
        raise ConfigInvalid(f"{form.what} {path} cannot be opened: {error}.") from None
    try:
        with translated(path, form.what):
            made.execute("PRAGMA trusted_schema = OFF")
            made.execute("PRAGMA cell_size_check = ON")
            _prepare(made, path, form)
    except BaseException:
        made.close()
        raise
    return made


def _prepare(made: sqlite3.Connection, path: Path, form: DatabaseFormat) -> None:
    version, number = _pragma(made, "user_version"), _pragma(made, "application_id")
    if not version and not number:
        made.execute(f"PRAGMA journal_mode = {form.journal}")
        made.execute("BEGIN IMMEDIATE")
        try:
            if not _pragma(made, "user_version"):  # another process may have been faster
                for statement in form.schema.split(";"):
                    made.execute(statement)
                made.execute(f"PRAGMA application_id = {form.number}")
                made.execute(f"PRAGMA user_version = {form.version}")
            made.execute("COMMIT")
        except BaseException:
            made.execute("ROLLBACK")
            raise
        version, number = _pragma(made, "user_version"), _pragma(made, "application_id")
    if number != form.number:
        raise ConfigInvalid(f"{form.what} {path} belongs to another program.")
    if version > form.version:
        raise ConfigInvalid(
            f"{form.what} {path} is of version {version}; this program knows {form.version}. Use the newer program."
        )


def _pragma(made: sqlite3.Connection, name: str) -> int:
    return int(made.execute(f"PRAGMA {name}").fetchone()[0])


def _check_private(path: Path, what: str) -> None:
    status = path.stat()
    if not stat.S_ISREG(status.st_mode):
        raise ConfigInvalid(f"{what} {path} is not a regular file.")
    if status.st_mode & 0o077:
        mode = stat.S_IMODE(status.st_mode)
        raise ConfigInvalid(
            f"{what} {path} has mode {mode:04o}, so others may read it; run: chmod 600 {path}"
        )


@contextlib.contextmanager
def translated(path: Path, what: str) -> Iterator[None]:
    """Errors of SQLite as ConfigInvalid."""
    try:
        yield
    except sqlite3.Error as error:
        raise ConfigInvalid(f"{what} {path} cannot be used: {error}.") from None


@contextlib.contextmanager
def transaction(made: sqlite3.Connection, path: Path, what: str) -> Iterator[None]:
    """All or nothing, and alone: other writers wait up to BUSY_S."""
    with translated(path, what):
        made.execute("BEGIN IMMEDIATE")
        try:
            yield
            made.execute("COMMIT")
        except BaseException:
            if made.in_transaction:
                made.execute("ROLLBACK")
            raise
