"""Who calls: tenant tokens and the cluster token of this cluster, and the operator's own keys from a file."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path

from mooncache.auth import Authenticator, read_private_file
from mooncache.errors import ConfigInvalid, PermissionDenied, Unauthenticated
from mooncache.gateway.core import console_session
from mooncache.gateway.core.keyfile import FILE_BYTES_MAX, ApiKey, parse
from mooncache.gateway.core.rate_limit import RateLimits

_KEY_CHARS_MAX = 512


@dataclass(frozen=True, slots=True)
class Caller:
    """An authenticated caller. `admin`: holds the cluster token; its requests have no rate limit of their own."""

    tenant: str
    admin: bool
    limits: RateLimits


class Keyring:
    """Checks `Authorization: Bearer ...`. `load` reads the file; `refresh` reads it again when it has changed."""

    def __init__(self, authenticator: Authenticator, path: Path | None, defaults: RateLimits) -> None:
        self._authenticator = authenticator
        self._path = path
        self._defaults = defaults
        self._keys: dict[str, ApiKey] = {}
        self._console_names: frozenset[str] = frozenset()
        self._stamp: tuple[int, int, int] | None = None

    def load(self) -> None:
        """Raises ConfigInvalid for a missing, malformed or too widely readable file."""
        if self._path is None:
            return
        data, status = read_private_file(self._path, "gateway.keys_file", FILE_BYTES_MAX + 1)
        if len(data) > FILE_BYTES_MAX:
            raise ConfigInvalid(f"gateway.keys_file {self._path} is larger than {FILE_BYTES_MAX} bytes.")
        self._keys = parse(data.decode("utf-8", "replace"), self._defaults)
        self._console_names = frozenset(
            digest[: console_session.KEY_DIGITS] for digest, key in self._keys.items() if key.console
        )
        self._stamp = (status.st_mtime_ns, status.st_size, status.st_ino)

    def refresh(self) -> bool:
        """Read the file again when it changed; True when it did.

        Raises ConfigInvalid for a file that is wrong or gone; the keys of before stay in force.
        """
        if self._path is None:
            return False
        try:
            status = self._path.stat()
        except OSError as error:
            raise ConfigInvalid(f"gateway.keys_file {self._path} cannot be read: {error.strerror}.") from None
        if (status.st_mtime_ns, status.st_size, status.st_ino) == self._stamp:
            return False
        self.load()
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
        """Who presents `Bearer <key>`. Raises Unauthenticated; the key never shows in the text."""
        scheme, _, key = authorization.partition(" ")
        key = key.strip()
        if scheme.lower() == "bearer" and key and len(key) <= _KEY_CHARS_MAX:
            # Looked up by hash: how long this takes tells nothing about keys that exist.
            found = self._keys.get(hashlib.sha256(key.encode()).hexdigest())
            if found is not None:
                return Caller(found.tenant, False, found.limits)
        elif not authorization:
            raise Unauthenticated(
                "You did not provide an API key. Send it as `Authorization: Bearer YOUR_KEY`; "
                "a tenant token of this cluster works."
            )
        try:
            identity = self._authenticator.identify(f"{scheme} {key}")
        except Unauthenticated:
            raise Unauthenticated(
                "Incorrect API key provided. Use a tenant token of this cluster or a key from its operator."
            ) from None
        return Caller(identity.tenant, identity.admin, RateLimits() if identity.admin else self._defaults)
