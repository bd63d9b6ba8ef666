"""Limits and priorities of tenants and keys: set by the operator's commands, read by gateways.

A tenant's limits have the key "". Whoever has a row has all limits of it; a row of zeros is deleted.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import astuple, replace
from typing import Final

import msgspec

from mooncache.accounts.core.api_key import is_key_id
from mooncache.accounts.core.copying import LimitCopies, limits_to_copy
from mooncache.accounts.core.request_limits import LIMIT_NAMES, HolderLimits, LimitHolder
from mooncache.accounts.database import AccountsPlace, AccountStore, exists, stamp_of
from mooncache.accounts.database_format import AccountStamp, DatabaseFormat
from mooncache.auth import check_tenant_name
from mooncache.errors import ConfigInvalid, InvalidArgument, LimitExceeded

FILE_NAME: Final = "limits.sqlite"
ROWS_MAX: Final = 200_000
_FORMAT: Final = DatabaseFormat(
    what="The file of limits",
    topic="limits",
    file_name=FILE_NAME,
    number=0x6D636C69,  # "mcli"
    version=1,
    schema="""CREATE TABLE request_limit (
        tenant TEXT NOT NULL, key_id TEXT NOT NULL, requests_per_minute REAL NOT NULL, tokens_per_minute REAL NOT NULL,
        requests_under_way INTEGER NOT NULL, tokens_under_way INTEGER NOT NULL, money_per_month REAL NOT NULL,
        PRIMARY KEY (tenant, key_id)
    ) STRICT, WITHOUT ROWID""",
    added=(("request_limit", "priority", "INTEGER NOT NULL DEFAULT 0"),),
)
_COLUMNS: Final = ", ".join(("tenant", "key_id", *LIMIT_NAMES))
_MARKS: Final = ", ".join("?" * (2 + len(LIMIT_NAMES)))
_INSERT: Final = f"INSERT INTO request_limit ({_COLUMNS}) VALUES ({_MARKS})"  # noqa: S608
_SELECT_ONE: Final = f"SELECT {_COLUMNS} FROM request_limit WHERE tenant = ? AND key_id = ?"  # noqa: S608
_LimitRow = tuple[str, str, float, float, int, int, float, int]


class LimitStore(AccountStore):
    """The limits of a place. Use as `with LimitStore(place) as store`; all methods block for a moment."""

    def __init__(self, place: AccountsPlace, *, create: bool = False) -> None:
        """Raises ConfigInvalid."""
        super().__init__(place, _FORMAT, create=create)

    def set(self, tenant: str, key_id: str, limits: HolderLimits) -> None:
        """Keep all limits of a tenant (`key_id` "") or of a key. Raises InvalidArgument, LimitExceeded."""
        limits.check()
        _check_holder(tenant, key_id)
        with self._database.transaction(changes=True):
            self._keep(tenant, key_id, limits)

    def change(self, tenant: str, key_id: str, given: Mapping[str, float]) -> HolderLimits:
        """Change those that are named, whatever others change at the same time; all that the holder has then.

        Raises InvalidArgument, LimitExceeded, ConfigInvalid.
        """
        replace(HolderLimits(), **given).check()  # type: ignore[arg-type]
        _check_holder(tenant, key_id)
        with self._database.transaction(changes=True):
            rows = self._database.ask(_SELECT_ONE, (tenant, key_id))
            known = self._row(rows[0])[1] if rows else HolderLimits()
            limits = replace(known, **given)  # type: ignore[arg-type]
            self._keep(tenant, key_id, limits)
        return limits

    def _keep(self, tenant: str, key_id: str, limits: HolderLimits) -> None:
        """Within a transaction."""
        ask = self._database.ask
        ask("DELETE FROM request_limit WHERE tenant = ? AND key_id = ?", (tenant, key_id))
        if not limits:
            return
        self._check_room(ask("SELECT count(*) FROM request_limit")[0][0] + 1)
        ask(_INSERT, (tenant, key_id, *astuple(limits)))

    def take_over(self, limits: Mapping[LimitHolder, HolderLimits]) -> LimitCopies:
        """Keep limits of another place for those who have none here. All or nothing. Raises LimitExceeded."""
        copies = limits_to_copy(limits, self.all())
        if not copies.new:  # then no other writer has to wait, and gateways need not read again
            return copies
        with self._database.transaction(changes=True, rows=len(limits)):
            here = self.all()
            copies = limits_to_copy(limits, here)
            self._check_room(len(here) + len(copies.new))
            self._database.ask_all(
                _INSERT, ((*holder, *astuple(each)) for holder, each in copies.new.items())
            )
        return copies

    def _check_room(self, count: int) -> None:
        if count > ROWS_MAX:
            raise LimitExceeded(
                f"{self.name} would have limits of more than {ROWS_MAX} tenants and keys, which is the most."
            )

    def all(self) -> dict[LimitHolder, HolderLimits]:
        """Every row. Raises ConfigInvalid for one that is no limits."""
        rows = self._database.ask(f"SELECT {_COLUMNS} FROM request_limit LIMIT ?", (ROWS_MAX + 1,))  # noqa: S608
        if len(rows) > ROWS_MAX:
            raise ConfigInvalid(f"{self.name} has more than {ROWS_MAX} rows.")
        return dict(map(self._row, rows))

    def _row(self, row: tuple[object, ...]) -> tuple[LimitHolder, HolderLimits]:
        try:
            tenant, key_id, *values = msgspec.convert(row, _LimitRow)
            limits = HolderLimits(*values)
            limits.check()
            _check_holder(tenant, key_id)
        except (InvalidArgument, msgspec.ValidationError) as error:
            raise ConfigInvalid(f"{self.name} has a row that is no limits: {error}") from None
        return (tenant, key_id), limits


def change_limits(place: AccountsPlace, tenant: str, key_id: str, given: Mapping[str, float]) -> HolderLimits:
    """Change the limits that are named, of a tenant (`key_id` "") or a key; all that it has then.

    Raises InvalidArgument, LimitExceeded, ConfigInvalid, AccountsUnavailable.
    """
    with LimitStore(place, create=True) as store:
        return store.change(tenant, key_id, given)


def all_limits(place: AccountsPlace) -> dict[LimitHolder, HolderLimits]:
    """What was set, by tenant and key; nothing where none was. Raises ConfigInvalid, AccountsUnavailable."""
    if not has_limits(place):
        return {}
    with LimitStore(place) as store:
        return store.all()


def has_limits(place: AccountsPlace) -> bool:
    """Whether there is a store of limits to open."""
    return exists(place, _FORMAT)


def limits_stamp_of(place: AccountsPlace) -> AccountStamp | None:
    """What to compare to see whether limits changed; None: there is no file.

    Raises ConfigInvalid, AccountsUnavailable.
    """
    return stamp_of(place, _FORMAT)


def _check_holder(tenant: str, key_id: str) -> None:
    check_tenant_name(tenant)
    if key_id and not is_key_id(key_id):
        raise InvalidArgument(f"{key_id[:80]!r} is no id of a key; `mooncache key ls` lists them.")
