"""Accounts in a PostgreSQL database that gateways of several hosts share: connections, deadlines, steps of the schema.

Each call is one transaction on one of a few connections. It sets what it needs with SET LOCAL, so a pooler between
(PgBouncer by transactions) may hand each transaction another connection. Two clocks bound it: PostgreSQL ends a
statement after CALL_S, and a server that no longer says anything is given up by this side after the same time.

An error that is the database's absence is AccountsUnavailable: what was asked for may have been done or not. What the
database refuses is ConfigInvalid, and was not done. No text has the URL's password.
"""

from __future__ import annotations

import contextlib
import secrets
import threading
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain, islice
from typing import TYPE_CHECKING, Any, Final

from mooncache.accounts.database_format import AccountStamp, DatabaseFormat
from mooncache.accounts.postgres_schema import LOCK_NUMBER, OLDEST, SCHEMA, STEPS
from mooncache.config.accounts_place import DatabaseUrl
from mooncache.errors import AccountsUnavailable, ConfigInvalid

if TYPE_CHECKING:
    from mooncache.accounts.postgres_connection import TimedConnection

CONNECTIONS_MAX: Final = 6
"""Two more than readers of usage at one time, who may hold theirs for CALL_S."""
_IDLE_MAX: Final = 2
CONNECT_S: Final = 5
CALL_S: Final = 10.0
ROW_S: Final = 0.002
"""For each row of a large part, beyond CALL_S: what waited while the database was away is to arrive on a busy one."""
LOCK_S: Final = 5.0
STEPS_S: Final = 60.0
"""For steps of the schema: other processes wait for the first one that carries them out."""
_TOKEN_BYTES: Final = 16
_ROWS_AT_ONCE: Final = 1000  # with at most 65,535 values


class PostgresAccounts:
    """The connections of one process to the database, made when they are needed. Any thread may use it."""

    def __init__(self, url: DatabaseUrl) -> None:
        """Raises ConfigInvalid without psycopg."""
        try:
            from mooncache.accounts import postgres_connection
        except ImportError as error:
            raise ConfigInvalid(
                f"Accounts in PostgreSQL need the extra postgres: pip install 'mooncache[postgres]' ({error})."
            ) from None
        self._driver = postgres_connection
        self._url, self.name = url, f"The database of accounts {url}"
        self._places = threading.BoundedSemaphore(CONNECTIONS_MAX)
        self._idle: list[TimedConnection] = []  # the one that was used last is taken first
        self._lock = threading.Lock()
        self._is_prepared = self._is_closed = False

    def __str__(self) -> str:
        return str(self._url)

    def database(self, form: DatabaseFormat) -> PostgresDatabase:
        """One store's view of it."""
        return PostgresDatabase(self, form.topic)

    def stamp(self, form: DatabaseFormat) -> AccountStamp:
        """Another one after each change of what the store holds. Raises ConfigInvalid, AccountsUnavailable."""
        rows = self.database(form).ask("SELECT token FROM account_change WHERE topic = ?", (form.topic,))
        return tuple(str(row[0]) for row in rows)

    def close(self) -> None:
        """End all connections; those in use end with their transaction. Harmless to repeat."""
        with self._lock:
            self._is_closed = True
            idle, self._idle = self._idle, []
        for connection in idle:
            connection.close()

    @contextlib.contextmanager
    def transaction(self, rows: int = 0) -> Iterator[TimedConnection]:
        """All or nothing; `rows` that it writes have time beyond CALL_S. Raises ConfigInvalid, AccountsUnavailable."""
        if not self._places.acquire(timeout=CALL_S):
            raise AccountsUnavailable(f"{self.name} has no free connection: {CONNECTIONS_MAX} are in use.")
        try:
            with self._driver.translated(self.name):
                self._prepare()
                connection = self._begun(CALL_S + rows * ROW_S, LOCK_S)
                try:
                    yield connection
                    connection.execute("COMMIT")
                except BaseException:
                    connection.abandon()
                    raise
                finally:
                    self._give_back(connection)
        finally:
            self._places.release()

    def _begun(self, call_s: float, lock_s: float) -> TimedConnection:
        """A connection within a new transaction. One that broke while it was idle is replaced."""
        while (connection := self._take()) is not None:
            try:
                connection.begin(SCHEMA, call_s, lock_s)
                return connection
            except self._driver.BROKEN:
                connection.close()
                if connection.is_late:  # the server is silent: the next one would wait as long
                    raise
        connection = self._driver.connect(self._url.secret_text, CONNECT_S)
        try:
            connection.begin(SCHEMA, call_s, lock_s)
        except BaseException:
            connection.close()
            raise
        return connection

    def _take(self) -> TimedConnection | None:
        with self._lock:
            return self._idle.pop() if self._idle else None

    def _give_back(self, connection: TimedConnection) -> None:
        with self._lock:
            if connection.is_reusable and not self._is_closed and len(self._idle) < _IDLE_MAX:
                self._idle.append(connection)
                return
        connection.close()

    def _prepare(self) -> None:
        """Carry out the steps that the database lacks, once in a process.

        A table that is missing later is no reason to make it: keys that were known would become none.
        """
        if self._is_prepared:
            return
        connection = self._begun(STEPS_S, STEPS_S)
        try:
            if _steps_done(connection, self.name) < len(STEPS):
                connection.execute("SELECT pg_advisory_xact_lock(%s)", (LOCK_NUMBER,))
                _carry_out(connection, _steps_done(connection, self.name))
            connection.execute("COMMIT")
            self._is_prepared = True
        except BaseException:
            connection.abandon()
            raise
        finally:
            self._give_back(connection)


class PostgresDatabase:
    """One store's view of the database; an `AccountDatabase`. One thread at a time may use it."""

    def __init__(self, accounts: PostgresAccounts, topic: str) -> None:
        self._accounts, self._topic = accounts, topic
        self._connection: TimedConnection | None = None  # of the transaction under way

    @property
    def name(self) -> str:
        """What sentences call it."""
        return self._accounts.name

    def ask(self, statement: str, values: Sequence[object] = ()) -> list[tuple[Any, ...]]:
        """Rows of a statement. Raises ConfigInvalid, AccountsUnavailable."""
        if self._connection is not None:
            return self._connection.rows(_translated(statement), values)
        with self._accounts.transaction() as connection:
            return connection.rows(_translated(statement), values)

    def ask_all(self, statement: str, rows: Iterable[Sequence[object]]) -> None:
        """Carry out an `INSERT ... VALUES (?, ...)` for each row, many at once, within a transaction.

        No two rows have the same key. Raises ConfigInvalid, AccountsUnavailable.
        """
        assert self._connection is not None, "outside of a transaction"
        head, _, rest = statement.partition("VALUES ")
        marks, _, tail = rest.partition(")")
        left = iter(rows)
        while part := list(islice(left, _ROWS_AT_ONCE)):
            several = ", ".join([f"{marks})"] * len(part))
            self._connection.rows(
                _translated(f"{head}VALUES {several}{tail}"), list(chain.from_iterable(part))
            )

    @contextlib.contextmanager
    def transaction(self, *, changes: bool = False, rows: int = 0) -> Iterator[None]:
        """All or nothing. `changes` makes those that change follow each other, and the stamp another one.

        Raises ConfigInvalid, AccountsUnavailable.
        """
        with self._accounts.transaction(rows) as connection:
            self._connection = connection
            try:
                if changes:
                    self.ask(
                        "UPDATE account_change SET token = ? WHERE topic = ?",
                        (secrets.token_hex(_TOKEN_BYTES), self._topic),
                    )
                yield
            finally:
                self._connection = None

    def close(self) -> None:
        """Connections stay with the process."""


def _translated(statement: str) -> str:
    """With the marks that psycopg has for values; no statement of ours has either character elsewhere."""
    return statement.replace("?", "%s")


def _steps_done(connection: TimedConnection, name: str) -> int:
    """How many steps the database has carried out. Raises ConfigInvalid when this program is too old for it."""
    # A query on the catalogue: to_regclass may answer from a cache of before this transaction waited for the lock.
    found = "SELECT count(*) FROM pg_tables WHERE schemaname = %s AND tablename = 'account_schema'"
    if not connection.rows(found, (SCHEMA,))[0][0]:
        return 0
    done, oldest = connection.rows("SELECT steps, oldest FROM account_schema")[0]
    if oldest > len(STEPS):
        raise ConfigInvalid(
            f"{name} needs a program that knows {oldest} steps of its tables; this one knows {len(STEPS)}. "
            "Use the newer program."
        )
    return int(done)


def _carry_out(connection: TimedConnection, done: int) -> None:
    if not done:
        if not connection.rows("SELECT count(*) FROM pg_namespace WHERE nspname = %s", (SCHEMA,))[0][0]:
            connection.execute(f"CREATE SCHEMA {SCHEMA}")  # who may not, has it made by an administrator
        connection.execute("CREATE TABLE account_schema (steps BIGINT NOT NULL, oldest BIGINT NOT NULL)")
        connection.execute("INSERT INTO account_schema (steps, oldest) VALUES (0, 0)")
    for number, step in enumerate(STEPS[done:], done + 1):
        connection.execute(step)
        connection.execute("UPDATE account_schema SET steps = %s, oldest = %s", (number, OLDEST[number - 1]))
