"""psycopg as accounts use it: a connection whose transactions have a deadline on this side, too."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Generator, Iterator, Sequence
from typing import Any, Final, TypeVar

import psycopg
from psycopg import errors
from psycopg.pq import TransactionStatus

from mooncache.errors import AccountsUnavailable, ConfigInvalid

BROKEN: Final = (psycopg.OperationalError, psycopg.InterfaceError)
"""The connection or the server is away, or busy beyond a deadline."""
_ABSENT: Final = (
    *BROKEN,
    errors.ReadOnlySqlTransaction,  # of a server that was the leader before
    errors.IdleInTransactionSessionTimeout,  # this process stood still
)
_LOOK_S: Final = 0.1
_END_S: Final = 2.0
Result = TypeVar("Result")


class TimedConnection(psycopg.Connection[tuple[Any, ...]]):
    """A connection in autocommit; transactions are begun explicitly and end by their deadline.

    `is_late`: the server did not answer by it.
    """

    until_s: float = math.inf
    is_late: bool = False

    def wait(
        self, gen: Generator[Any, Any, Result], interval: float = _LOOK_S, timeout: float | None = None
    ) -> Result:
        """Whatever is asked of the server waits here. Raises OperationalError at the deadline."""
        left_s = max(0.0, self.until_s - time.monotonic())
        limit_s = None if left_s == math.inf else left_s
        try:
            return super().wait(gen, interval, limit_s if timeout is None else timeout)
        except psycopg.OperationalError:
            self.is_late = time.monotonic() >= self.until_s
            raise

    def begin(self, schema: str, call_s: float, lock_s: float) -> None:
        """Begin a transaction. It has a moment more here than at the server, whose error says more."""
        self.until_s = time.monotonic() + call_s + 1.0
        self.execute(
            f"BEGIN; SET LOCAL search_path = {schema}, pg_temp; SET LOCAL statement_timeout = {round(call_s * 1e3)}; "
            f"SET LOCAL lock_timeout = {round(min(call_s, lock_s) * 1e3)}; "
            f"SET LOCAL idle_in_transaction_session_timeout = {round(call_s * 2e3)}"
        )

    def rows(self, statement: str, values: Sequence[object] = ()) -> list[tuple[Any, ...]]:
        """The rows of a statement; none of one that has no result."""
        with self.execute(statement, values or None) as cursor:
            return cursor.fetchall() if cursor.description is not None else []

    def abandon(self) -> None:
        """Roll back; a connection that cannot is closed."""
        with contextlib.suppress(psycopg.Error):
            if self.pgconn.transaction_status in (TransactionStatus.INTRANS, TransactionStatus.INERROR):
                self.until_s = time.monotonic() + _END_S
                self.execute("ROLLBACK")

    @property
    def is_reusable(self) -> bool:
        """Whether another transaction may begin."""
        return not self.closed and self.pgconn.transaction_status == TransactionStatus.IDLE


def connect(url: str, timeout_s: int) -> TimedConnection:
    """A connection. Raises psycopg.Error."""
    return TimedConnection.connect(
        url,
        autocommit=True,
        prepare_threshold=None,  # a pooler may give each transaction another server process
        connect_timeout=timeout_s,
        application_name="mooncache",
    )


@contextlib.contextmanager
def translated(name: str) -> Iterator[None]:
    """Errors of psycopg as those of the catalogue. `name` begins the sentence."""
    try:
        yield
    except _ABSENT as error:
        raise AccountsUnavailable(f"{name} does not answer: {_reason(error)}.") from None
    except (psycopg.Error, UnicodeEncodeError) as error:
        raise ConfigInvalid(f"{name} cannot be used: {_reason(error)}.") from None


def _reason(error: Exception) -> str:
    """What the server or libpq says, in one line. What it says of a URL may have a piece of the password."""
    if isinstance(error, psycopg.ProgrammingError) and error.diag.message_primary is None:
        return "its URL is none that libpq understands"
    said = error.diag.message_primary if isinstance(error, psycopg.Error) else None
    lines = (said or str(error)).strip().splitlines() or [type(error).__name__]
    return lines[0].rstrip(".")
