"""API keys: made and revoked by the operator's commands, read by gateways.

A row is what `ApiKeyRecord` says: the key itself is not in it. Rows come from a database and are checked one by one.
Keys that have ended stay for a while, so that a list says what became of them.
"""

from __future__ import annotations

import secrets
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import astuple, replace
from typing import Final, NamedTuple

import msgspec

from mooncache.accounts.core.api_key import (
    ID_BYTES,
    SECRET_BYTES,
    ApiKeyRecord,
    KeyScope,
    digest_of,
    is_key_id,
    key_text,
    scopes_of,
)
from mooncache.accounts.core.copying import KeyCopies, keys_to_copy
from mooncache.accounts.database import AccountsPlace, AccountStore, exists, stamp_of
from mooncache.accounts.database_format import AccountStamp, DatabaseFormat
from mooncache.errors import ConfigInvalid, InvalidArgument, LimitExceeded, NotFound

FILE_NAME: Final = "keys.sqlite"
KEYS_MAX: Final = 100_000
TENANT_KEYS_MAX: Final = 1_000
TENANTS_LISTED_MAX: Final = 10_000
ENDED_KEPT_S: Final = 400 * 86_400
_FORMAT: Final = DatabaseFormat(
    what="The file of API keys",
    topic="keys",
    file_name=FILE_NAME,
    number=0x6D63616B,  # "mcak"
    version=1,
    schema="""CREATE TABLE api_key (
        id TEXT PRIMARY KEY, tenant TEXT NOT NULL, name TEXT NOT NULL, scopes TEXT NOT NULL, sha256 BLOB NOT NULL,
        created_s INTEGER NOT NULL, expires_s INTEGER NOT NULL, revoked_s INTEGER NOT NULL,
        requests_per_minute REAL NOT NULL, tokens_per_minute REAL NOT NULL, created_by TEXT NOT NULL
    ) STRICT""",
)
_COLUMNS: Final = (  # in the order of ApiKeyRecord's fields
    "id, tenant, scopes, sha256, created_s, name, expires_s, revoked_s, requests_per_minute, tokens_per_minute, "
    "created_by"
)
_INSERT: Final = f"INSERT INTO api_key ({_COLUMNS}) VALUES (?,?,?,?,?,?,?,?,?,?,?)"  # noqa: S608
_REVOKE: Final = "UPDATE api_key SET revoked_s = ? WHERE id = ?"

_KeyRow = tuple[str, str, str, bytes, int, str, int, int, float, float, str]


class KeyStore(AccountStore):
    """The keys of a place. Use as `with KeyStore(place) as store`; all methods block for a moment."""

    def __init__(self, place: AccountsPlace, *, create: bool = False) -> None:
        """Raises ConfigInvalid."""
        super().__init__(place, _FORMAT, create=create)

    def add(self, record: ApiKeyRecord) -> None:
        """Keep a new key. Raises InvalidArgument, LimitExceeded."""
        record.check()
        ask = self._database.ask
        with self._database.transaction(changes=True):
            old_s = record.created_s - ENDED_KEPT_S
            ask(
                "DELETE FROM api_key WHERE (expires_s > 0 AND expires_s < ?) OR (revoked_s > 0 AND revoked_s < ?)",
                (old_s, old_s),
            )
            count = ask("SELECT count(*) FROM api_key")[0][0]
            mine = ask("SELECT count(*) FROM api_key WHERE tenant = ?", (record.tenant,))[0][0]
            self._check_room(count + 1, mine + 1)
            ask(_INSERT, _row(record))

    def take_over(self, keys: Mapping[str, ApiKeyRecord], now_s: int) -> KeyCopies:
        """Keep keys of another place, by their id, that are not here yet; those that it revoked end. All or nothing.

        Raises LimitExceeded.
        """
        copies = keys_to_copy(keys, self.all(), now_s - ENDED_KEPT_S)
        if (
            not copies.new and not copies.revoked
        ):  # then no other writer has to wait, and gateways need not read again
            return copies
        with self._database.transaction(changes=True, rows=len(keys)):
            here = self.all()
            copies = keys_to_copy(keys, here, now_s - ENDED_KEPT_S)
            tenants = Counter(each.tenant for each in (*here.values(), *copies.new))
            self._check_room(tenants.total(), max((tenants[each.tenant] for each in copies.new), default=0))
            self._database.ask_all(_INSERT, map(_row, copies.new))
            for each in copies.revoked:
                self._database.ask(_REVOKE, (each.revoked_s, each.key_id))
        return copies

    def _check_room(self, count: int, of_tenant: int) -> None:
        if count > KEYS_MAX or of_tenant > TENANT_KEYS_MAX:
            limit = f"{KEYS_MAX} keys" if count > KEYS_MAX else f"{TENANT_KEYS_MAX} keys of one tenant"
            raise LimitExceeded(
                f"{self.name} would hold more than {limit}, which is the limit. Keys that ended more than "
                f"{ENDED_KEPT_S // 86_400} days ago do not count."
            )

    def revoke(self, key_id: str, now_s: int) -> ApiKeyRecord:
        """End a key now; one that was revoked before keeps its time. Raises NotFound."""
        if not is_key_id(key_id):
            raise InvalidArgument(f"{key_id[:80]!r} is no id of a key; `mooncache key ls` lists them.")
        with self._database.transaction(changes=True):
            rows = self._database.ask(f"SELECT {_COLUMNS} FROM api_key WHERE id = ?", (key_id,))  # noqa: S608
            if not rows:
                raise NotFound(
                    f"There is no key {key_id}: {self.name} does not have it; `mooncache key ls` lists them."
                )
            found = self._record(rows[0])
            if not found.revoked_s:
                found = replace(found, revoked_s=now_s)
                self._database.ask(_REVOKE, (now_s, key_id))
        return found

    def all(self) -> dict[str, ApiKeyRecord]:
        """Every key by its id, those that have ended too. Raises ConfigInvalid for a row that is no key."""
        rows = self._database.ask(
            f"SELECT {_COLUMNS} FROM api_key ORDER BY created_s, id LIMIT ?",  # noqa: S608
            (KEYS_MAX + 1,),
        )
        if len(rows) > KEYS_MAX:
            raise ConfigInvalid(f"{self.name} has more than {KEYS_MAX} keys.")
        return {found.key_id: found for found in map(self._record, rows)}

    def of_tenant(self, tenant: str) -> list[ApiKeyRecord]:
        """Every key of a tenant, the newest first. Raises ConfigInvalid for a row that is no key."""
        rows = self._database.ask(
            f"SELECT {_COLUMNS} FROM api_key WHERE tenant = ? ORDER BY created_s DESC, id LIMIT ?",  # noqa: S608
            (tenant, TENANT_KEYS_MAX),
        )
        return [self._record(row) for row in rows]

    def valid_counts(self, now_s: int) -> dict[str, int]:
        """How many keys of each tenant are valid; the first `TENANTS_LISTED_MAX` tenants by name."""
        rows = self._database.ask(
            "SELECT tenant, sum(CASE WHEN revoked_s = 0 AND (expires_s = 0 OR expires_s > ?) THEN 1 ELSE 0 END) "
            "FROM api_key GROUP BY tenant ORDER BY tenant LIMIT ?",
            (now_s, TENANTS_LISTED_MAX),
        )
        return {str(tenant): int(count) for tenant, count in rows}

    def _record(self, row: tuple[object, ...]) -> ApiKeyRecord:
        try:
            return _record(row)
        except (InvalidArgument, msgspec.ValidationError) as error:
            raise ConfigInvalid(f"{self.name} has a row that is no key: {error}") from None


class NewKey(NamedTuple):
    """A key that was made. Its text is shown once and not kept."""

    text: str
    record: ApiKeyRecord


def create_key(
    place: AccountsPlace,
    tenant: str,
    scopes: Iterable[KeyScope],
    *,
    created_s: int,
    created_by: str,
    expires_s: int = 0,
    name: str = "",
    requests_per_minute: float = 0,
    tokens_per_minute: float = 0,
) -> NewKey:
    """Make a key of a tenant and keep its hash. Times are Unix seconds; an end of 0 is none.

    Raises InvalidArgument, LimitExceeded, ConfigInvalid, AccountsUnavailable.
    """
    if expires_s and expires_s <= created_s:
        raise InvalidArgument("The end of a key has to be in the future.")
    id_bytes = secrets.token_bytes(ID_BYTES)
    text = key_text(id_bytes, secrets.token_bytes(SECRET_BYTES))
    record = ApiKeyRecord(
        key_id=id_bytes.hex(),
        tenant=tenant,
        scopes=frozenset(scopes),
        digest=digest_of(text),
        created_s=created_s,
        name=name,
        expires_s=expires_s,
        requests_per_minute=requests_per_minute,
        tokens_per_minute=tokens_per_minute,
        created_by=created_by,
    )
    record.check()
    with KeyStore(place, create=True) as store:
        store.add(record)
    return NewKey(text, record)


def revoke_key(place: AccountsPlace, key_id: str, now_s: int) -> ApiKeyRecord:
    """End a key now. Raises InvalidArgument, NotFound, ConfigInvalid, AccountsUnavailable."""
    if not has_keys(place):
        raise NotFound(f"There are no keys in {place}; `mooncache key create` makes one.")
    with KeyStore(place) as store:
        return store.revoke(key_id, now_s)


def every_key(place: AccountsPlace) -> dict[str, ApiKeyRecord]:
    """Every key of a place by its id, those that have ended too. Raises ConfigInvalid, AccountsUnavailable."""
    if not has_keys(place):
        return {}
    with KeyStore(place) as store:
        return store.all()


def keys_of_tenant(place: AccountsPlace, tenant: str) -> list[ApiKeyRecord]:
    """Every key of a tenant, the newest first. Raises ConfigInvalid, AccountsUnavailable."""
    if not has_keys(place):
        return []
    with KeyStore(place) as store:
        return store.of_tenant(tenant)


def valid_key_counts(place: AccountsPlace, now_s: int) -> dict[str, int]:
    """How many keys of each tenant are valid. Raises ConfigInvalid, AccountsUnavailable."""
    if not has_keys(place):
        return {}
    with KeyStore(place) as store:
        return store.valid_counts(now_s)


def has_keys(place: AccountsPlace) -> bool:
    """Whether there is a store of keys to open."""
    return exists(place, _FORMAT)


def keys_stamp_of(place: AccountsPlace) -> AccountStamp | None:
    """What to compare to see whether keys changed; None: there is no file.

    Raises ConfigInvalid, AccountsUnavailable.
    """
    return stamp_of(place, _FORMAT)


def _row(record: ApiKeyRecord) -> tuple[object, ...]:
    key_id, tenant, scopes, *others = astuple(record)
    return key_id, tenant, " ".join(sorted(scopes)), *others


def _record(row: tuple[object, ...]) -> ApiKeyRecord:
    """Raises InvalidArgument, ValidationError."""
    key_id, tenant, scopes, digest, created_s, name, expires_s, revoked_s, requests, tokens, by = (
        msgspec.convert(row, _KeyRow, builtin_types=(bytes,))
    )
    found = ApiKeyRecord(
        key_id,
        tenant,
        scopes_of(scopes.split()),
        digest,
        created_s,
        name,
        expires_s,
        revoked_s,
        requests,
        tokens,
        by,
    )
    found.check()
    return found
