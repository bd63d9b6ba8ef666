"""Who may call: the cluster token, tenant tokens made from it, and the check of a presented one.

A cluster token is the cluster's one secret, a file of mode 0600. A tenant token is derived from it, so the
service needs no list: it derives the tenant's key again and compares in constant time. Revoking one
tenant means a new cluster token. Neither token is ever put into a message, a log line or a repr.

    cluster token   mcc1.<64 hex: the secret>           acts as tenant "default" with admin rights
    tenant token    mct1.<tenant>.<64 hex: tenant key>  acts as that tenant
    session token   mcs1.<tenant>.<end>.<64 hex>        acts as that tenant at the data ports of nodes, until the end
    control key     mck1.[<tenant>.]<64 hex>            proves the cluster token, or a tenant's, at control ports

A session token is made for one tenant's requests by the gateway; engines show it to the nodes. It is derived from the
tenant's key and its end (seconds of Unix time), so nodes keep no list of them either. It opens no control port.

A control key is what control calls are proven with (runtime/proof.py). Programs that call over gRPC get it instead of
the token: it opens no data port, and no token, salt or other key follows from it.
"""

from __future__ import annotations

import hmac
import os
import re
import secrets
import stat
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from mooncache.errors import ConfigInvalid, InvalidArgument, Unauthenticated

DEFAULT_TENANT: Final = "default"
SECRET_BYTES: Final = 32
_CLUSTER: Final = re.compile(r"mcc1\.([0-9a-f]{64})")
_TENANT: Final = re.compile(r"mct1\.([a-z0-9][a-z0-9_.-]{0,62})\.([0-9a-f]{64})")
_SESSION: Final = re.compile(r"mcs1\.([a-z0-9][a-z0-9_.-]{0,62})\.([1-9][0-9]{0,11})\.([0-9a-f]{64})")
_CONTROL: Final = re.compile(r"mck1\.(?:([a-z0-9][a-z0-9_.-]{0,62})\.)?([0-9a-f]{64})")
_TENANT_NAME: Final = re.compile(r"[a-z0-9][a-z0-9_.-]{0,62}")
_DERIVE_PREFIX: Final = b"mooncache tenant v1\0"
_SESSION_PREFIX: Final = b"mooncache session v1\0"
_SALT_PREFIX: Final = b"mooncache cache salt v1\0"
_ENGINE_PREFIX: Final = b"mooncache engine key v1\0"
_CONTROL_PREFIX: Final = b"mooncache control v1\0"
_METRICS_PREFIX: Final = b"mooncache metrics key v1\0"
_PICKER_PREFIX: Final = b"mooncache picker key v1\0"
_CONSOLE_PREFIX: Final = b"mooncache console sessions v1\0"
_FILE_BYTES_MAX: Final = 4096
_TOKEN_CHARS_MAX: Final = 256
SESSION_S: Final = 900
"""A session token is good for so long at least, and for twice as long at most."""


@dataclass(frozen=True, slots=True)
class Identity:
    """Who a caller is."""

    tenant: str
    admin: bool


@dataclass(frozen=True, slots=True)
class Token:
    """A token taken apart. `key` is the cluster's secret (`admin`) or the tenant's key; it never shows in a repr."""

    tenant: str
    admin: bool
    key: bytes = field(repr=False)

    @property
    def text(self) -> str:
        """The token as a person passes it on. Keep it out of logs."""
        return f"mcc1.{self.key.hex()}" if self.admin else f"mct1.{self.tenant}.{self.key.hex()}"

    @property
    def tenant_key(self) -> bytes:
        """Key that proves the tenant on the data plane."""
        return derive_tenant_key(self.key, self.tenant) if self.admin else self.key


@dataclass(frozen=True, slots=True)
class SessionToken:
    """A session token taken apart. `end_unix_s`: it is no longer good from then on."""

    tenant: str
    end_unix_s: int
    key: bytes = field(repr=False)

    @property
    def text(self) -> str:
        """The token as it is passed on. Keep it out of logs."""
        return f"mcs1.{self.tenant}.{self.end_unix_s}.{self.key.hex()}"


@dataclass(frozen=True, slots=True)
class ControlKey:
    """A control key taken apart. `tenant` is None for the cluster's own, which proves the cluster token."""

    tenant: str | None
    key: bytes = field(repr=False)

    @property
    def text(self) -> str:
        """The key as a person passes it on. Keep it out of logs."""
        return f"mck1.{self.key.hex()}" if self.tenant is None else f"mck1.{self.tenant}.{self.key.hex()}"


def keyed_hash(key: bytes, data: bytes) -> bytes:
    """BLAKE3 keyed hash, 32 bytes, by the native library."""
    from mooncache import _native

    digest: bytes = _native.blake3_keyed(key, data)
    return digest


def plain_hash(data: bytes) -> bytes:
    """BLAKE3 hash, 32 bytes, by the native library."""
    from mooncache import _native

    digest: bytes = _native.blake3(data)
    return digest


def check_tenant_name(tenant: str) -> str:
    """The name when it is well formed. Raises InvalidArgument."""
    if not _TENANT_NAME.fullmatch(tenant):
        raise InvalidArgument(
            f"{tenant[:80]!r} is not a tenant name; use 1 to 63 of a-z, 0-9, '_', '.', '-', beginning with a-z or 0-9."
        )
    return tenant


def tenant_id(tenant: str) -> int:
    """Number of a tenant in reports and on nodes: first eight bytes, little endian, of the name's hash."""
    return int.from_bytes(plain_hash(check_tenant_name(tenant).encode())[:8], "little")


def derive_tenant_key(secret: bytes, tenant: str) -> bytes:
    """The key of a tenant, 32 bytes."""
    return keyed_hash(secret, _DERIVE_PREFIX + check_tenant_name(tenant).encode())


def tenant_token(cluster: Token, tenant: str) -> Token:
    """Make a tenant's token from the cluster token. Raises InvalidArgument for a wrong name or a non-cluster token."""
    if not cluster.admin:
        raise InvalidArgument("Tenant tokens are made from the cluster token; this is a tenant token.")
    return Token(tenant, admin=False, key=derive_tenant_key(cluster.key, tenant))


def session_token(cluster: Token, tenant: str, now_unix_s: float) -> SessionToken:
    """A session token of a tenant. All that are made within SESSION_S are equal, so that sessions can be shared.

    Raises InvalidArgument for a wrong name or a token that is not the cluster's.
    """
    end = (int(now_unix_s) // SESSION_S + 2) * SESSION_S
    key = keyed_hash(tenant_token(cluster, tenant).key, _SESSION_PREFIX + end.to_bytes(8, "little"))
    return SessionToken(tenant, end, key)


def parse_session_token(text: str) -> SessionToken:
    """Take a session token apart; the text itself never appears in the error. Raises Unauthenticated."""
    match = _SESSION.fullmatch(text) if len(text) <= _TOKEN_CHARS_MAX else None
    if match is None:
        raise Unauthenticated(
            "The text is no session token; it has the form mcs1.<tenant>.<end>.<64 hex digits>."
        )
    return SessionToken(match[1], int(match[2]), bytes.fromhex(match[3]))


def cache_salt(cluster: Token, tenant: str, client_salt: str = "") -> str:
    """Salt that keeps the blocks of tenants apart; without the cluster token it cannot be guessed.

    `client_salt` is what the client itself asked for (OpenAI's `cache_salt`): it separates further, inside the tenant.
    """
    data = _SALT_PREFIX + tenant.encode() + b"\0" + client_salt.encode()
    return keyed_hash(cluster.key, data)[:16].hex()


def public_salt(cluster: Token) -> str:
    """Salt of blocks that tenants agreed to share."""
    return keyed_hash(cluster.key, _SALT_PREFIX)[:16].hex()


def engine_key(cluster: Token) -> str:
    """Bearer key of the engines' own HTTP servers: gateways and workers know it, clients do not."""
    return "mce1." + keyed_hash(cluster.key, _ENGINE_PREFIX).hex()


def metrics_key(cluster: Token) -> str:
    """Bearer key of /metrics beyond loopback. It opens nothing else, so that a scraper needs no cluster token."""
    return "mcm1." + keyed_hash(cluster.key, _METRICS_PREFIX).hex()


def picker_key(cluster: Token) -> str:
    """Bearer key that Envoy shows to the endpoint picker. It opens nothing else."""
    return "mcx1." + keyed_hash(cluster.key, _PICKER_PREFIX).hex()


def console_key(cluster: Token) -> bytes:
    """Key (32 bytes) that signs the console's session cookies. It never leaves the gateways."""
    return keyed_hash(cluster.key, _CONSOLE_PREFIX)


def derive_control_key(key: bytes) -> bytes:
    """Key (32 bytes) that proves control calls, from a cluster's secret or a tenant's key."""
    return keyed_hash(key, _CONTROL_PREFIX)


def control_key(token: Token) -> ControlKey:
    """The control key of a cluster token or of a tenant's token."""
    return ControlKey(None if token.admin else token.tenant, derive_control_key(token.key))


def parse_control_key(text: str) -> ControlKey:
    """Take a control key apart; the text itself never appears in the error. Raises Unauthenticated."""
    match = _CONTROL.fullmatch(text) if len(text) <= _TOKEN_CHARS_MAX else None
    if match is None:
        raise Unauthenticated("The text is no control key; `mooncache token --control` prints it: mck1.…")
    return ControlKey(match[1], bytes.fromhex(match[2]))


def parse_token(text: str) -> Token:
    """Take a token apart; the text itself never appears in the error. Raises Unauthenticated."""
    text = text.strip()
    if len(text) <= _TOKEN_CHARS_MAX:
        if match := _CLUSTER.fullmatch(text):
            return Token(DEFAULT_TENANT, admin=True, key=bytes.fromhex(match[1]))
        if match := _TENANT.fullmatch(text):
            return Token(match[1], admin=False, key=bytes.fromhex(match[2]))
    raise Unauthenticated(
        "The token has no known form; it begins with mcc1. (cluster) or mct1.<tenant>. (tenant)."
    )


class Authenticator:
    """Checks presented tokens against the cluster's secret, in time that does not depend on them."""

    def __init__(self, cluster: Token) -> None:
        if not cluster.admin:
            raise ConfigInvalid("A service needs the cluster token (mcc1.…); a tenant token was given.")
        self._cluster = cluster

    def identify(self, authorization: str) -> Identity:
        """Who presents `Bearer <token>`. Raises Unauthenticated."""
        scheme, _, text = authorization.partition(" ")
        if scheme.lower() != "bearer" or not text:
            raise Unauthenticated("No token was sent; pass the cluster token or a tenant token.")
        token = parse_token(text)
        expected = self._cluster.key if token.admin else derive_tenant_key(self._cluster.key, token.tenant)
        if not hmac.compare_digest(token.key, expected):
            raise Unauthenticated(
                "The token is not one of this cluster; check that both ends use the same token file."
            )
        return Identity(token.tenant, token.admin)


def create_cluster_token(path: Path) -> Token:
    """Generate a cluster token and write it, mode 0600. Raises FileExistsError when the file is there
    already.

    The file appears whole or not at all: two services that start together agree on one token.
    """
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    token = Token(DEFAULT_TENANT, admin=True, key=secrets.token_bytes(SECRET_BYTES))
    partial = path.with_name(f".{path.name}.{os.getpid()}.{secrets.token_hex(4)}")
    descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(token.text.encode() + b"\n")
            file.flush()
            os.fsync(file.fileno())
        os.link(partial, path)  # refuses to replace, unlike rename
    finally:
        partial.unlink()
    return token


def read_private_file(
    path: Path, what: str, bytes_max: int, missing: str = ""
) -> tuple[bytes, os.stat_result]:
    """The first bytes of a file with a secret, and what the file is; `what` begins the sentences.

    Args:
        missing: what to say instead when there is no such file.

    Raises:
        ConfigInvalid: missing, not a regular file, or readable by others.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except FileNotFoundError:
        raise ConfigInvalid(missing or f"{what} {path} does not exist.") from None
    except OSError as error:
        raise ConfigInvalid(f"{what} {path} cannot be read: {error.strerror}.") from None
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise ConfigInvalid(f"{what} {path} is not a regular file.")
        if status.st_mode & 0o077:
            mode = stat.S_IMODE(status.st_mode)
            raise ConfigInvalid(
                f"{what} {path} has mode {mode:04o}, so others may read it; run: chmod 600 {path}"
            )
        with open(descriptor, "rb", closefd=False) as file:
            return file.read(bytes_max), status
    finally:
        os.close(descriptor)


def load_cluster_token(path: Path) -> Token:
    """Read the cluster token. Raises ConfigInvalid for a missing, malformed or too widely readable file."""
    data, _ = read_private_file(path, "The cluster token file", _FILE_BYTES_MAX)
    match = _CLUSTER.fullmatch(data.decode("ascii", "replace").strip())
    if match is None:
        raise ConfigInvalid(f"The cluster token file {path} does not hold one line mcc1.<64 hex digits>.")
    return Token(DEFAULT_TENANT, admin=True, key=bytes.fromhex(match[1]))


def load_or_create_cluster_token(path: Path) -> tuple[Token, bool]:
    """The cluster token and whether this call created it. Raises ConfigInvalid."""
    if not path.exists():
        try:
            return create_cluster_token(path), True
        except FileExistsError:
            pass  # another process was faster; its token is the one
        except OSError as error:
            raise ConfigInvalid(
                f"The cluster token file {path} cannot be written: {error.strerror}."
            ) from None
    return load_cluster_token(path), False
