"""Who calls: tenant tokens and the cluster token of this cluster, keys that the operator made, and keys of a file."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from mooncache.accounts.core.api_key import (
    ALL_SCOPES,
    TENANT_SCOPES,
    ApiKeyRecord,
    KeyScope,
    KeyState,
    id_of,
    is_text_of,
)
from mooncache.accounts.key_store import KeyFileStamp, KeyStore, stamp_of
from mooncache.auth import Authenticator, read_private_file
from mooncache.errors import ConfigInvalid, PermissionDenied, Unauthenticated
from mooncache.gateway.core import console_session, faults
from mooncache.gateway.core.faults import Refusal
from mooncache.gateway.core.keyfile import FILE_BYTES_MAX, ApiKey, parse
from mooncache.gateway.core.rate_limit import RateLimits

CLUSTER_KEY: Final = "cluster"
"""What usage calls the cluster token."""
TENANT_TOKEN: Final = "token"  # noqa: S105
"""What usage calls a tenant's token: all of a tenant's are the same."""
_FILE_KEY: Final = "file-"
_FILE_KEY_DIGITS: Final = 12
_KEY_CHARS_MAX = 512


@dataclass(frozen=True, slots=True)
class Caller:
    """An authenticated caller.

    Attributes: `admin` holds the cluster token; its requests have no rate limit of their own. `key_id` names the key
    without opening anything; `scopes` is what the key may be used for.
    """

    tenant: str
    admin: bool
    limits: RateLimits
    key_id: str = TENANT_TOKEN
    scopes: frozenset[KeyScope] = TENANT_SCOPES

    @property
    def may_end(self) -> bool:
        """Whether the key can be taken away while a request runs; tokens cannot."""
        return self.key_id not in (CLUSTER_KEY, TENANT_TOKEN)


class Keyring:
    """Checks `Authorization: Bearer ...`. `load` reads the files; `refresh` reads those again that have changed."""

    def __init__(
        self,
        authenticator: Authenticator,
        path: Path | None,
        defaults: RateLimits,
        folder: Path,
        wall_s: Callable[[], float],
    ) -> None:
        """path: the key file. folder: where `mooncache key` keeps keys. wall_s: Unix time."""
        self._authenticator = authenticator
        self._path, self._folder = path, folder
        self._defaults = defaults
        self._wall_s = wall_s
        self._keys: dict[str, ApiKey] = {}
        self._console_names: frozenset[str] = frozenset()
        self._file_ids: frozenset[str] = frozenset()
        self._stamp: tuple[int, int, int] | None = None
        self._made: dict[str, ApiKeyRecord] = {}
        self._made_stamp: KeyFileStamp | None = None

    def load(self) -> None:
        """Raises ConfigInvalid for a missing, malformed or too widely readable file."""
        self._load_file()
        self._load_made()

    def _load_file(self) -> None:
        if self._path is None:
            return
        data, status = read_private_file(self._path, "gateway.keys_file", FILE_BYTES_MAX + 1)
        if len(data) > FILE_BYTES_MAX:
            raise ConfigInvalid(f"gateway.keys_file {self._path} is larger than {FILE_BYTES_MAX} bytes.")
        self._keys = parse(data.decode("utf-8", "replace"), self._defaults)
        self._console_names = frozenset(
            digest[: console_session.KEY_DIGITS] for digest, key in self._keys.items() if key.console
        )
        self._file_ids = frozenset(map(_file_key_id, self._keys))
        self._stamp = (status.st_mtime_ns, status.st_size, status.st_ino)

    def _load_made(self) -> bool:
        """Read keys that were made, when there are any and they have changed; True when they had."""
        stamp = stamp_of(self._folder)
        if stamp == self._made_stamp:
            return False
        if stamp is None:
            raise ConfigInvalid(f"The file of API keys in {self._folder} is gone; its keys stay in force.")
        with KeyStore(self._folder) as store:
            self._made = store.all()
        self._made_stamp = stamp
        return True

    def refresh(self) -> bool:
        """Read again what changed; True when something did.

        Raises ConfigInvalid for a file that is wrong or gone; the keys of before stay in force.
        """
        changed = self._load_made()
        if self._path is None:
            return changed
        try:
            status = self._path.stat()
        except OSError as error:
            raise ConfigInvalid(f"gateway.keys_file {self._path} cannot be read: {error.strerror}.") from None
        if (status.st_mtime_ns, status.st_size, status.st_ino) == self._stamp:
            return changed
        self._load_file()
        return True

    def limit(self, defaults: RateLimits) -> None:
        """Other limits for whoever has none of its own; the file is read again for them by the next `refresh`."""
        self._defaults, self._stamp = defaults, None

    def console_name(self, authorization: str) -> str:
        """The name under which `Bearer <key>` signs in to the console.

        Raises Unauthenticated for an unknown key, PermissionDenied for one that does not open the console.
        """
        caller = self.identify(authorization)
        if caller.admin:
            return console_session.CLUSTER
        digest = hashlib.sha256(authorization.partition(" ")[2].strip().encode()).hexdigest()
        name = digest[: console_session.KEY_DIGITS]
        if not self.opens_console(name):
            raise PermissionDenied(
                f"This is a key of tenant {caller.tenant}. The console shows all tenants' requests, so it needs the "
                "cluster token, or a key with `console = true` in gateway.keys_file."
            )
        return name

    def opens_console(self, name: str) -> bool:
        """Whether who signed in under this name may still see the console."""
        return name == console_session.CLUSTER or name in self._console_names

    def identify(self, authorization: str) -> Caller:
        """Who presents `Bearer <key>`. Raises Unauthenticated, Refusal; the key never shows in the text."""
        scheme, _, key = authorization.partition(" ")
        key = key.strip()
        if scheme.lower() == "bearer" and key and len(key) <= _KEY_CHARS_MAX:
            if key_id := id_of(key):
                return self._made_caller(key_id, key)
            # Looked up by hash: how long this takes tells nothing about keys that exist.
            digest = hashlib.sha256(key.encode()).hexdigest()
            found = self._keys.get(digest)
            if found is not None:
                return Caller(found.tenant, False, found.limits, _file_key_id(digest))
        elif not authorization:
            raise Unauthenticated(
                "You did not provide an API key. Send it as `Authorization: Bearer YOUR_KEY`; "
                "a tenant token of this cluster works."
            )
        try:
            identity = self._authenticator.identify(f"{scheme} {key}")
        except Unauthenticated:
            raise _unknown() from None
        if identity.admin:
            return Caller(identity.tenant, True, RateLimits(), CLUSTER_KEY, ALL_SCOPES)
        return Caller(identity.tenant, False, self._defaults)

    def end_of(self, key_id: str) -> Refusal | None:
        """Why a key that a request came with opens nothing now; None while it does."""
        if key_id.startswith(_FILE_KEY):
            return None if key_id in self._file_ids else _ended(KeyState.REVOKED)
        record = self._made.get(key_id)
        state = KeyState.REVOKED if record is None else record.state(self._wall_s())
        return None if state is KeyState.VALID else _ended(state)

    def _made_caller(self, key_id: str, text: str) -> Caller:
        record = self._made.get(key_id)
        if not is_text_of(record, text) or record is None:
            raise _unknown()
        # Only a holder of the key hears that it has ended.
        if (ended := self.end_of(key_id)) is not None:
            raise ended
        limits = RateLimits(
            record.requests_per_minute or self._defaults.requests_per_minute,
            record.tokens_per_minute or self._defaults.tokens_per_minute,
        )
        return Caller(record.tenant, False, limits, key_id, record.scopes)


def _file_key_id(digest: str) -> str:
    return _FILE_KEY + digest[:_FILE_KEY_DIGITS]


def _unknown() -> Unauthenticated:
    return Unauthenticated(
        "Incorrect API key provided. Use a tenant token of this cluster or a key from its operator."
    )


def _ended(state: KeyState) -> Refusal:
    what = "has expired" if state is KeyState.EXPIRED else "was revoked"
    return faults.refuse(
        Unauthenticated(f"This API key {what}. Ask the operator for another one."), code=f"key_{state}"
    )
