"""Numbered parts of writers: each is added once, however often it is written."""

from __future__ import annotations

from typing import Final

from mooncache.accounts.database_format import AccountDatabase

WRITER_KEPT_S: Final = 7 * 86_400  # a part is repeated within seconds of its first try


def take_part(
    database: AccountDatabase, table: str, writer: str, sequence: int, now_s: int
) -> tuple[bool, bool]:
    """Within a transaction: whether the writer is new, and whether this part of it was not added yet.

    One statement decides. So a part that is repeated while its first try is still being committed waits for that,
    and is then known.
    """
    known = database.ask(f"SELECT 1 FROM {table} WHERE id = ?", (writer,))  # noqa: S608
    if not known:
        database.ask(f"DELETE FROM {table} WHERE written_s < ?", (now_s - WRITER_KEPT_S,))  # noqa: S608
    taken = database.ask(
        f"INSERT INTO {table} (id, sequence, written_s) VALUES (?, ?, ?) "  # noqa: S608
        "ON CONFLICT (id) DO UPDATE SET sequence = excluded.sequence, written_s = excluded.written_s "
        f"WHERE {table}.sequence < excluded.sequence RETURNING sequence",
        (writer, sequence, now_s),
    )
    return not known, bool(taken)
