"""Usage: gateways add what they counted, commands and tenants read sums.

Several gateways share a database. Each adds numbered parts, and the database knows the last number of each, so a part
whose commit was in doubt is written again without being counted twice. Rows are kept for KEPT_S.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Final

import msgspec

from mooncache.accounts.core.usage import (
    COUNTS,
    UsageCounts,
    UsageField,
    UsageHour,
    UsageKey,
    UsagePart,
    UsageSum,
)
from mooncache.accounts.database import AccountsPlace, AccountStore, exists
from mooncache.accounts.database_format import DatabaseFormat
from mooncache.accounts.parts import take_part
from mooncache.errors import ConfigInvalid, LimitExceeded

FILE_NAME: Final = "usage.sqlite"
KEPT_S: Final = 400 * 86_400
SUMS_MAX: Final = 100_000
_CLEAN_EVERY: Final = 512  # parts of a writer: some ten minutes
_FORMAT: Final = DatabaseFormat(
    what="The file of usage",
    topic="usage",
    file_name=FILE_NAME,
    number=0x6D637573,  # "mcus"
    version=1,
    schema="""CREATE TABLE usage (
        hour_s INTEGER NOT NULL, tenant TEXT NOT NULL, key_id TEXT NOT NULL, model TEXT NOT NULL,
        work_class TEXT NOT NULL, requests INTEGER NOT NULL, failed INTEGER NOT NULL, cancelled INTEGER NOT NULL,
        input_tokens INTEGER NOT NULL, cached_tokens INTEGER NOT NULL, output_tokens INTEGER NOT NULL,
        estimated_tokens INTEGER NOT NULL, PRIMARY KEY (hour_s, tenant, key_id, model, work_class)
    ) STRICT, WITHOUT ROWID;
    CREATE TABLE usage_writer (
        id TEXT PRIMARY KEY, sequence INTEGER NOT NULL, written_s INTEGER NOT NULL
    ) STRICT""",
)
_NAMES: Final = tuple(UsageField)
_SUMS: Final = ", ".join(f"CAST(sum({name}) AS BIGINT)" for name in COUNTS)
_ADD: Final = (
    f"INSERT INTO usage ({', '.join((*_NAMES, *COUNTS))}) "  # noqa: S608
    f"VALUES ({', '.join('?' * (len(_NAMES) + len(COUNTS)))}) ON CONFLICT ({', '.join(_NAMES)}) DO UPDATE SET "
    + ", ".join(f"{name} = usage.{name} + excluded.{name}" for name in COUNTS)
)
_COPIED: Final = "copy:"
_MARK: Final = (
    "INSERT INTO usage_writer (id, sequence, written_s) VALUES (?, ?, ?) "
    "ON CONFLICT (id) DO NOTHING RETURNING id"
)


def has_usage(place: AccountsPlace) -> bool:
    """Whether there is a store of usage to open."""
    return exists(place, _FORMAT)


class UsageStore(AccountStore):
    """The usage of a place. Use as `with UsageStore(place) as store`; all methods block for a moment."""

    def __init__(self, place: AccountsPlace, *, create: bool = False) -> None:
        """Raises ConfigInvalid."""
        super().__init__(place, _FORMAT, create=create)

    def add(self, writer: str, part: UsagePart, now_s: int) -> bool:
        """Add a part of a writer, on disk when this returns; False when it was there already.

        Raises ConfigInvalid, also for a full disk, and AccountsUnavailable; then it is written again.
        """
        with self._database.transaction(rows=len(part.rows)):
            _, is_new = take_part(self._database, "usage_writer", writer, part.sequence, now_s)
            if not is_new:
                return False
            self._database.ask_all(_ADD, _values(part.rows))
            if part.sequence % _CLEAN_EVERY == 1:
                self._database.ask("DELETE FROM usage WHERE hour_s < ?", (now_s - KEPT_S,))
        return True

    def add_copied(self, copy: UsageHour, rows: Mapping[UsageKey, UsageCounts], now_s: int) -> bool:
        """Add an hour of another place, on disk when this returns; False when it was added before.

        Raises ConfigInvalid, AccountsUnavailable; then it may be added again.
        """
        mark = f"{_COPIED}{copy.source}:{copy.hour_s}"
        with self._database.transaction(rows=len(rows)):
            # Kept for as long as the rows are, not for days as the marks of gateways.
            values = (mark, copy.requests, now_s + KEPT_S)
            if not self._database.ask(_MARK, values):
                return False
            self._database.ask_all(_ADD, _values(rows))
        return True

    def copied(self, source: str) -> dict[int, int]:
        """Requests in each hour that was copied from a place, when it was."""
        head = f"{_COPIED}{source}:"
        found = self._database.ask("SELECT id, sequence FROM usage_writer WHERE id LIKE ?", (f"{head}%",))
        return {int(str(mark).removeprefix(head)): int(requests) for mark, requests in found}

    def sums(
        self, by: Sequence[UsageField], *, since_s: int = 0, until_s: int = 1 << 62, tenant: str | None = None
    ) -> list[UsageSum]:
        """Sums over the hours that begin from `since_s` on and before `until_s`, ordered by the fields' values.

        Raises:
            LimitExceeded: there are more than SUMS_MAX of them.
            ConfigInvalid: a row is no usage.
        """
        names = ", ".join(by)
        where = "hour_s >= ? AND hour_s < ?" + ("" if tenant is None else " AND tenant = ?")
        values: list[object] = [since_s, until_s, *([] if tenant is None else [tenant]), SUMS_MAX + 1]
        query = (
            f"SELECT {''.join(f'{each}, ' for each in by)}{_SUMS} "  # noqa: S608
            f"FROM usage WHERE {where} {f'GROUP BY {names} ORDER BY {names}' if by else 'HAVING count(*) > 0'} LIMIT ?"
        )
        rows = self._database.ask(query, values)
        if len(rows) > SUMS_MAX:
            raise LimitExceeded(
                f"There are more than {SUMS_MAX} sums; ask for a shorter time or fewer fields."
            )
        return [self._sum(row, len(by)) for row in rows]

    def _sum(self, row: tuple[object, ...], fields: int) -> UsageSum:
        try:
            values = msgspec.convert(row[:fields], tuple[str | int, ...])
            counts = UsageCounts(*msgspec.convert(row[fields:], tuple[int, ...]))
            counts.check()
        except (msgspec.ValidationError, AssertionError) as error:
            raise ConfigInvalid(f"{self.name} has a row that is no usage: {error}.") from None
        return UsageSum(values, counts)


def _values(rows: Mapping[UsageKey, UsageCounts]) -> Iterator[tuple[object, ...]]:
    """In one order, so that two writers never wait for each other."""
    for key, counts in sorted(rows.items(), key=lambda row: row[0]):
        yield (*key, *(getattr(counts, each) for each in COUNTS))
