"""The audit log in a database that several hosts share: one chain of all writers.

A writer holds the row of `account_change` that has the hash of the last line, until its own line is there. So writers
of all hosts follow each other, and the last line cannot be cut off unseen: that row still names it. ENTRIES_MAX lines
are kept.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Final

import msgspec

from mooncache.accounts.core.audit import FIRST, AuditEntry, hash_of, line_of, trimmed
from mooncache.errors import ConfigInvalid

if TYPE_CHECKING:
    from mooncache.accounts.postgres import PostgresAccounts

ENTRIES_MAX: Final = 1_000_000
_CLEAN_EVERY: Final = 256
_PAGE: Final = 1000


def append(accounts: PostgresAccounts, entry: AuditEntry) -> None:
    """Add an entry, on disk when this returns. Raises ConfigInvalid, AccountsUnavailable."""
    with accounts.transaction() as connection:
        found = connection.rows("SELECT token FROM account_change WHERE topic = 'audit' FOR UPDATE")
        if not found:
            raise ConfigInvalid(f"{accounts.name} has lost the end of its audit log.")
        # Only now the last number is the last: the lock may have been waited for.
        number = connection.rows("SELECT coalesce(max(number), 0) + 1 FROM audit_entry")[0][0]
        line = line_of(msgspec.structs.replace(trimmed(entry), previous=found[0][0] or FIRST))
        connection.rows("INSERT INTO audit_entry (number, line) VALUES (%s, %s)", (number, line))
        connection.rows("UPDATE account_change SET token = %s WHERE topic = 'audit'", (hash_of(line),))
        if number % _CLEAN_EVERY == 0:
            connection.rows("DELETE FROM audit_entry WHERE number <= %s", (number - ENTRIES_MAX,))


def lines(accounts: PostgresAccounts) -> Iterator[bytes]:
    """All lines, the oldest first. Raises ConfigInvalid, AccountsUnavailable."""
    last = 0
    while True:
        with accounts.transaction() as connection:
            page = connection.rows(
                "SELECT number, line FROM audit_entry WHERE number > %s ORDER BY number LIMIT %s",
                (last, _PAGE),
            )
        for number, line in page:
            last = number
            yield bytes(line)
        if len(page) < _PAGE:
            return


def end_hash(accounts: PostgresAccounts) -> str:
    """The hash of the line that is the last by the row that writers hold; "" before the first one.

    Raises ConfigInvalid, AccountsUnavailable.
    """
    with accounts.transaction() as connection:
        found = connection.rows("SELECT token FROM account_change WHERE topic = 'audit'")
    return str(found[0][0]) if found else ""
