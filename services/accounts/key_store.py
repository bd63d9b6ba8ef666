"""API keys in an SQLite file of this host: made and revoked by the operator's commands, read by gateways.

A row is what `ApiKeyRecord` says: the key itself is not in it. Rows come from a file and are checked one by one. Keys
that have ended stay for a while, so that a list says what became of them.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Final

import msgspec

from mooncache.accounts.core.api_key import ApiKeyRecord, is_key_id, scopes_of
from mooncache.accounts.database import AccountFile, DatabaseFormat, transaction, translated
from mooncache.errors import ConfigInvalid, InvalidArgument, LimitExceeded, NotFound

FILE_NAME: Final = "keys.sqlite"
KEYS_MAX: Final = 100_000
TENANT_KEYS_MAX: Final = 1_000
ENDED_KEPT_S: Final = 400 * 86_400
_COUNTER_AT: Final = 24  # of the file's header: it counts transactions
_HEADER_BYTES: Final = 28
_WHAT: Final = "The file of API keys"
_FORMAT: Final = DatabaseFormat(
    what=_WHAT,
    number=0x6D63616B,  # "mcak"
    version=1,
    schema="""CREATE TABLE api_key (
        id TEXT PRIMARY KEY, tenant TEXT NOT NULL, name TEXT NOT NULL, scopes TEXT NOT NULL, sha256 BLOB NOT NULL,
        created_s INTEGER NOT NULL, expires_s INTEGER NOT NULL, revoked_s INTEGER NOT NULL,
        requests_per_minute REAL NOT NULL, tokens_per_minute REAL NOT NULL, created_by TEXT NOT NULL
    ) STRICT""",
)
_COLUMNS: Final = (
    "id, tenant, name, scopes, sha256, created_s, expires_s, revoked_s, requests_per_minute, tokens_per_minute, "
    "created_by"
)

_KeyRow = tuple[str, str, str, str, bytes, int, int, int, float, float, str]
KeyFileStamp = tuple[int, int, int, bytes]
"""Equal as long as nothing was written to the file."""


class KeyStore(AccountFile):
    """The file of keys in a folder. Use as `with KeyStore(folder) as store`; all methods block for a moment."""

    def __init__(self, folder: Path, *, create: bool = False) -> None:
        """Raises ConfigInvalid."""
        super().__init__(folder / FILE_NAME, _FORMAT, create=create)

    def add(self, record: ApiKeyRecord) -> None:
        """Keep a new key. Raises InvalidArgument, LimitExceeded."""
        record.check()
        ask = self._database.execute
        with transaction(self._database, self.path, _WHAT):
            old_s = record.created_s - ENDED_KEPT_S
            ask(
                "DELETE FROM api_key WHERE (expires_s > 0 AND expires_s < ?) OR (revoked_s > 0 AND revoked_s < ?)",
                (old_s, old_s),
            )
            count = ask("SELECT count(*) FROM api_key").fetchone()[0]
            mine = ask("SELECT count(*) FROM api_key WHERE tenant = ?", (record.tenant,)).fetchone()[0]
            if count >= KEYS_MAX or mine >= TENANT_KEYS_MAX:
                limit = f"{KEYS_MAX} keys" if count >= KEYS_MAX else f"{TENANT_KEYS_MAX} keys of one tenant"
                raise LimitExceeded(
                    f"{self.path} holds {limit}, which is the limit. Keys that ended more than "
                    f"{ENDED_KEPT_S // 86_400} days ago do not count."
                )
            ask(f"INSERT INTO api_key ({_COLUMNS}) VALUES (?,?,?,?,?,?,?,?,?,?,?)", _row(record))  # noqa: S608

    def revoke(self, key_id: str, now_s: int) -> ApiKeyRecord:
        """End a key now; one that was revoked before keeps its time. Raises NotFound."""
        if not is_key_id(key_id):
            raise InvalidArgument(f"{key_id[:80]!r} is no id of a key; `mooncache key ls` lists them.")
        with transaction(self._database, self.path, _WHAT):
            rows = self._database.execute(
                f"SELECT {_COLUMNS} FROM api_key WHERE id = ?",  # noqa: S608
                (key_id,),
            ).fetchall()
            if not rows:
                raise NotFound(f"There is no key {key_id} in {self.path}; `mooncache key ls` lists them.")
            found = self._record(rows[0])
            if not found.revoked_s:
                found = replace(found, revoked_s=now_s)
                self._database.execute("UPDATE api_key SET revoked_s = ? WHERE id = ?", (now_s, key_id))
        return found

    def all(self) -> dict[str, ApiKeyRecord]:
        """Every key by its id, those that have ended too. Raises ConfigInvalid for a row that is no key."""
        with translated(self.path, _WHAT):
            rows = self._database.execute(
                f"SELECT {_COLUMNS} FROM api_key ORDER BY created_s, id LIMIT ?",  # noqa: S608
                (KEYS_MAX + 1,),
            ).fetchall()
        if len(rows) > KEYS_MAX:
            raise ConfigInvalid(f"{_WHAT} {self.path} has more than {KEYS_MAX} keys.")
        return {found.key_id: found for found in map(self._record, rows)}

    def _record(self, row: tuple[object, ...]) -> ApiKeyRecord:
        try:
            return _record(row)
        except (InvalidArgument, msgspec.ValidationError) as error:
            raise ConfigInvalid(f"{_WHAT} {self.path} has a row that is no key: {error}") from None


def stamp_of(folder: Path, file_name: str = FILE_NAME, what: str = _WHAT) -> KeyFileStamp | None:
    """What to compare to see whether a file changed, without a lock; None: there is no file. Raises ConfigInvalid."""
    path = folder / file_name
    try:
        with path.open("rb") as opened:
            status, header = path.stat(), opened.read(_HEADER_BYTES)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise ConfigInvalid(f"{what} {path} cannot be read: {error.strerror}.") from None
    return status.st_ino, status.st_size, status.st_mtime_ns, header[_COUNTER_AT:]


def _row(record: ApiKeyRecord) -> tuple[object, ...]:
    return (
        record.key_id,
        record.tenant,
        record.name,
        " ".join(sorted(record.scopes)),
        record.digest,
        record.created_s,
        record.expires_s,
        record.revoked_s,
        record.requests_per_minute,
        record.tokens_per_minute,
        record.created_by,
    )


def _record(row: tuple[object, ...]) -> ApiKeyRecord:
    """Raises InvalidArgument, ValidationError."""
    key_id, tenant, name, scopes, digest, created_s, expires_s, revoked_s, requests, tokens, by = (
        msgspec.convert(row, _KeyRow, builtin_types=(bytes,))
    )
    found = ApiKeyRecord(
        key_id=key_id,
        tenant=tenant,
        scopes=scopes_of(scopes.split()),
        digest=digest,
        created_s=created_s,
        name=name,
        expires_s=expires_s,
        revoked_s=revoked_s,
        requests_per_minute=requests,
        tokens_per_minute=tokens,
        created_by=by,
    )
    found.check()
    return found
