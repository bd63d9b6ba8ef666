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
from mooncache.accounts.core.request_limits import HolderLimits, LimitHolder
from mooncache.accounts.database import AccountsPlace
from mooncache.accounts.database_format import AccountStamp
from mooncache.accounts.key_store import KeyStore, keys_stamp_of
from mooncache.accounts.limit_store import LimitStore, limits_stamp_of
from mooncache.auth import Authenticator, read_private_file
from mooncache.errors import AccountsUnavailable, ConfigInvalid, PermissionDenied, Unauthenticated
from mooncache.gateway.core import console_session, faults
from mooncache.gateway.core.console_session import TenantKey
from mooncache.gateway.core.faults import Refusal
from mooncache.gateway.core.holders import holder_of, split_holder
from mooncache.gateway.core.keyfile import FILE_BYTES_MAX, ApiKey, parse
from mooncache.gateway.core.rate_limit import RateLimits

CLUSTER_KEY: Final = "cluster"
"""What usage calls the cluster token."""
TENANT_TOKEN: Final = "token"  # noqa: S105
"""What usage calls a tenant's token: all of a tenant's are the same."""
_FILE_KEY: Final = "file-"
_FILE_KEY_DIGITS: Final = 12
_KEY_CHARS_MAX = 512
_NO_LIMITS: Final = RateLimits()


@dataclass(frozen=True, slots=True)
class Caller:
    """An authenticated caller.

    Attributes: `admin` holds the cluster token; its requests have no rate limit of their own. `key_id` names the key
    without opening anything; `scopes` is what the key may be used for. `limits` are the tenant's, `key_limits` those
    of the key beside them. `priority` was set for its key or tenant.
    """

    tenant: str
    admin: bool
    limits: RateLimits
    key_id: str = TENANT_TOKEN
    scopes: frozenset[KeyScope] = TENANT_SCOPES
    key_limits: RateLimits = _NO_LIMITS
    priority: int = 0

    def priority_of(self, asked: int) -> int:
        """Steps by which a request goes before others: with the cluster token what it asks for, else what was set."""
        return asked if self.admin else self.priority

    @property
    def holders(self) -> list[tuple[str, RateLimits]]:
        """Whose limits hold for its requests, and which. The key's come first: its requests are the fewer ones."""
        own = (self.tenant, self.limits)
        if self.key_limits == _NO_LIMITS:
            return [own]
        return [(holder_of(self.tenant, self.key_id), self.key_limits), own]

    @property
    def may_end(self) -> bool:
        """Whether the key can be taken away while a request runs; tokens cannot."""
        return self.key_id not in (CLUSTER_KEY, TENANT_TOKEN)


class Keyring:
    """Checks `Authorization: Bearer ...`. `load` reads the files; `refresh` reads those again that have changed.

    Attributes: `budgets` has the money that holders may spend in a month, of those that have a limit.
    """

    def __init__(
        self,
        authenticator: Authenticator,
        path: Path | None,
        defaults: RateLimits,
        place: AccountsPlace,
        wall_s: Callable[[], float],
        *,
        stale_max_s: float = 0.0,
    ) -> None:
        """path: the key file. place: where `mooncache key` keeps keys. wall_s: Unix time.

        stale_max_s: for how long keys of a database that is away open something; 0: without an end.
        """
        self._authenticator = authenticator
        self._path, self._place = path, place
        self._stale_max_s = 0.0 if isinstance(place, Path) else stale_max_s
        self._defaults = defaults
        self._wall_s = wall_s
        self._keys: dict[str, ApiKey] = {}
        self._console_names: frozenset[str] = frozenset()
        self._file_ids: dict[str, ApiKey] = {}
        self._stamp: tuple[int, int, int] | None = None
        self._made: dict[str, ApiKeyRecord] = {}
        self._made_stamp: AccountStamp | None = None
        self._set: dict[LimitHolder, HolderLimits] = {}
        self._set_stamp: AccountStamp | None = None
        self._confirmed_s = wall_s()
        self.budgets: dict[str, float] = {}

    @property
    def unconfirmed_s(self) -> float:
        """For how long changes of keys and limits may have gone unheard; a second while all is well."""
        return max(0.0, self._wall_s() - self._confirmed_s)

    def load(self) -> None:
        """Raises ConfigInvalid for a missing, malformed or too widely readable file; AccountsUnavailable."""
        self._load_file()
        self._load_made()
        self._load_limits()
        self._confirmed_s = self._wall_s()

    def _load_file(self) -> None:
        if self._path is None:
            return
        data, status = read_private_file(self._path, "gateway.keys_file", FILE_BYTES_MAX + 1)
        if len(data) > FILE_BYTES_MAX:
            raise ConfigInvalid(f"gateway.keys_file {self._path} is larger than {FILE_BYTES_MAX} bytes.")
        self._keys = parse(data.decode("utf-8", "replace"), _NO_LIMITS)
        self._console_names = frozenset(
            digest[: console_session.KEY_DIGITS] for digest, key in self._keys.items() if key.console
        )
        self._file_ids = {_file_key_id(digest): key for digest, key in self._keys.items()}
        self._stamp = (status.st_mtime_ns, status.st_size, status.st_ino)

    def _load_made(self) -> bool:
        """Read keys that were made, when there are any and they have changed; True when they had."""
        stamp = keys_stamp_of(self._place)
        if stamp == self._made_stamp:
            return False
        if stamp is None:
            raise ConfigInvalid(f"The file of API keys in {self._place} is gone; its keys stay in force.")
        with KeyStore(self._place) as store:
            self._made = store.all()
        self._made_stamp = stamp
        return True

    def _load_limits(self) -> bool:
        """Read limits that were set, when they have changed; True when they had."""
        stamp = limits_stamp_of(self._place)
        if stamp == self._set_stamp:
            return False
        if stamp is None:
            raise ConfigInvalid(f"The file of limits in {self._place} is gone; its limits stay in force.")
        with LimitStore(self._place) as store:
            self._set = store.all()
        self._set_stamp = stamp
        self.budgets = {
            holder_of(*holder) if holder[1] else holder[0]: limits.money_per_month
            for holder, limits in self._set.items()
            if limits.money_per_month
        }
        return True

    def refresh(self) -> bool:
        """Read again what changed; True when something did.

        Raises ConfigInvalid for a file that is wrong or gone, AccountsUnavailable for a database that does not answer;
        the keys of before stay in force.
        """
        changed, failed = False, None
        # One that is wrong does not hold up the others.
        for load in (self._load_made, self._load_limits, self._reload_file):
            try:
                changed |= load()
            except (ConfigInvalid, AccountsUnavailable) as error:
                failed = failed or error
        if failed is not None:
            raise failed
        self._confirmed_s = self._wall_s()
        return changed

    def _reload_file(self) -> bool:
        """Read the key file when it has changed; True when it had."""
        if self._path is None:
            return False
        try:
            status = self._path.stat()
        except OSError as error:
            raise ConfigInvalid(f"gateway.keys_file {self._path} cannot be read: {error.strerror}.") from None
        if (status.st_mtime_ns, status.st_size, status.st_ino) == self._stamp:
            return False
        self._load_file()
        return True

    def limit(self, defaults: RateLimits) -> None:
        """Other limits for whoever has none of its own."""
        self._defaults = defaults

    def console_name(self, authorization: str) -> str:
        """The name under which `Bearer <key>` signs in to the console: an operator's, or a tenant's.

        Raises Unauthenticated for an unknown key, PermissionDenied for one that is not for reading usage.
        """
        caller = self.identify(authorization)
        if caller.admin:
            return console_session.CLUSTER
        digest = hashlib.sha256(authorization.partition(" ")[2].strip().encode()).hexdigest()
        name = digest[: console_session.KEY_DIGITS]
        if self.opens_console(name):
            return name
        if KeyScope.USAGE not in caller.scopes:
            raise PermissionDenied(
                f"This is a key of tenant {caller.tenant} without the scope usage, so it opens no page of the console."
            )
        return TenantKey(caller.tenant, caller.key_id).who

    def opens_console(self, name: str) -> bool:
        """Whether who signed in under this name is an operator and may still see the console."""
        return name == console_session.CLUSTER or name in self._console_names

    def is_signed_in(self, name: str) -> bool:
        """Whether who signed in under this name may still see what it could: an operator, or a tenant."""
        key = console_session.tenant_key_of(name)
        if key is None:
            return self.opens_console(name)
        if key.key_id == TENANT_TOKEN:
            return bool(key.tenant)
        if (in_file := self._file_ids.get(key.key_id)) is not None:
            return in_file.tenant == key.tenant
        record = self._made.get(key.key_id)
        return (
            record is not None
            and record.state(self._wall_s()) is KeyState.VALID
            and record.tenant == key.tenant
            and KeyScope.USAGE in record.scopes
        )

    def limits_of(self, tenant: str, key_id: str) -> tuple[RateLimits, RateLimits]:
        """What requests of a tenant may ask for, and what those with this key."""
        if (in_file := self._file_ids.get(key_id)) is not None:
            return self._tenant_limits(tenant, in_file.limits), _NO_LIMITS
        record = self._made.get(key_id)
        said = _NO_LIMITS if record is None else _limits_said_by(record)
        return self._tenant_limits(tenant, said), self._key_limits(tenant, key_id)

    def priority_of(self, tenant: str, key_id: str) -> int:
        """Steps by which requests with a key go before others: the key's, else the tenant's; 0 is normal."""
        found = (self._set.get((tenant, each)) for each in (key_id, ""))
        return next((each.priority for each in found if each is not None and each.priority), 0)

    def running_limit(self, holder: str) -> int:
        """How many requests of a tenant, or with a key, may be under way; 0: no limit."""
        tenant, key_id = split_holder(holder)
        if key_id:
            return self._key_limits(tenant, key_id).requests_under_way
        return self._tenant_limits(tenant).requests_under_way

    def _tenant_limits(self, tenant: str, said: RateLimits = _NO_LIMITS) -> RateLimits:
        """A tenant's limits: as its key says, else as was set for the tenant, else the gateway's settings."""
        own = self._set.get((tenant, ""))
        if own is None and said == _NO_LIMITS:
            return self._defaults
        own = own or HolderLimits()
        defaults = self._defaults
        return RateLimits(
            said.requests_per_minute or own.requests_per_minute or defaults.requests_per_minute,
            said.tokens_per_minute or own.tokens_per_minute or defaults.tokens_per_minute,
            own.requests_under_way or defaults.requests_under_way,
            own.tokens_under_way or defaults.tokens_under_way,
            own.money_per_month,
        )

    def _key_limits(self, tenant: str, key_id: str) -> RateLimits:
        own = self._set.get((tenant, key_id)) if key_id else None
        return _NO_LIMITS if own is None else _limits_set_to(own)

    def identify(self, authorization: str) -> Caller:
        """Who presents `Bearer <key>`. Raises Unauthenticated, Refusal, AccountsUnavailable; no text has the key."""
        scheme, _, key = authorization.partition(" ")
        key = key.strip()
        if scheme.lower() == "bearer" and key and len(key) <= _KEY_CHARS_MAX:
            if key_id := id_of(key):
                return self._made_caller(key_id, key)
            # Looked up by hash: how long this takes tells nothing about keys that exist.
            digest = hashlib.sha256(key.encode()).hexdigest()
            found = self._keys.get(digest)
            if found is not None:
                limits = self._tenant_limits(found.tenant, found.limits)
                key_id = _file_key_id(digest)
                return Caller(
                    found.tenant, False, limits, key_id, priority=self.priority_of(found.tenant, key_id)
                )
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
        tenant = identity.tenant
        return Caller(
            tenant, False, self._tenant_limits(tenant), priority=self.priority_of(tenant, TENANT_TOKEN)
        )

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
        if self._stale_max_s and self.unconfirmed_s > self._stale_max_s:
            raise AccountsUnavailable(
                "The database of API keys has been away for too long to know whether this key still holds."
            )
        # Only a holder of the key hears that it has ended.
        if (ended := self.end_of(key_id)) is not None:
            raise ended
        limits = self._tenant_limits(record.tenant, _limits_said_by(record))
        own = self._key_limits(record.tenant, key_id)
        priority = self.priority_of(record.tenant, key_id)
        return Caller(record.tenant, False, limits, key_id, record.scopes, own, priority)


def _limits_set_to(own: HolderLimits) -> RateLimits:
    return RateLimits(
        own.requests_per_minute,
        own.tokens_per_minute,
        own.requests_under_way,
        own.tokens_under_way,
        own.money_per_month,
    )


def _limits_said_by(record: ApiKeyRecord) -> RateLimits:
    return RateLimits(record.requests_per_minute, record.tokens_per_minute)


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
