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

The file may hold two cluster tokens while a new one takes the place of the old one (`TokenSet`): the first one is used
by what calls, both are accepted from callers.

    mooncache-tokens 1 incoming only `mooncache token` writes this, and `end`: half of such a file is no file
    mcc1.<64 hex>               signs
    mcc1.<64 hex>               is accepted, too: incoming, or outgoing
    mcr1.<64 hex>               root of the salts: the secret of the token with which they began
    end

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
from functools import lru_cache
from pathlib import Path
from typing import Final, Protocol

from mooncache.errors import ConfigInvalid, InvalidArgument, Unauthenticated

DEFAULT_TENANT: Final = "default"
SECRET_BYTES: Final = 32
_CLUSTER: Final = re.compile(r"mcc1\.([0-9a-f]{64})")
_TENANT: Final = re.compile(r"mct1\.([a-z0-9][a-z0-9_.-]{0,62})\.([0-9a-f]{64})")
_SESSION: Final = re.compile(r"mcs1\.([a-z0-9][a-z0-9_.-]{0,62})\.([1-9][0-9]{0,11})\.([0-9a-f]{64})")
_ROOT: Final = re.compile(r"mcr1\.([0-9a-f]{64})")
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
_FINGERPRINT_PREFIX: Final = b"mooncache token fingerprint v1\0"
_FINGERPRINT_BYTES: Final = 6
_FILE_BYTES_MAX: Final = 4096
_FILE_HEAD: Final = re.compile(r"mooncache-tokens 1 (incoming|outgoing)")
_FILE_END: Final = "end"
_TENANT_IDS_MAX: Final = 4096  # that are kept, by name
TOKENS_MAX: Final = 2
"""Cluster tokens that are valid at a time."""
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

    @property
    def fingerprint(self) -> str:
        """What the token is called in lists and logs: 12 hex digits, from which nothing of it follows."""
        return keyed_hash(self.key, _FINGERPRINT_PREFIX)[:_FINGERPRINT_BYTES].hex()


class TokenSource(Protocol):
    """Where the text of a token comes from that may be replaced meanwhile. A `Token` is one that never is."""

    @property
    def text(self) -> str:
        """The text to prove now."""
        ...


def text_of(token: str | TokenSource) -> str:
    """The text of a token, or of what a source has now."""
    return token if isinstance(token, str) else token.text


@dataclass(frozen=True, slots=True)
class TokenSet:
    """The cluster tokens that are valid at a time: the first one signs, all of them are accepted.

    `salts` is what salts of requests are made from. It outlives the token that it comes from, because with other salts
    the cache begins empty; it opens nothing. `incoming`: the second token is the newer one, and will sign later.
    """

    tokens: tuple[Token, ...]
    salts: Token = field(repr=False)
    incoming: bool = False

    def __post_init__(self) -> None:
        if not 1 <= len(self.tokens) <= TOKENS_MAX or not all(token.admin for token in self.tokens):
            raise ConfigInvalid(
                f"A cluster has 1 to {TOKENS_MAX} cluster tokens (mcc1.…); a tenant token is none."
            )
        if len({token.key for token in self.tokens}) != len(self.tokens):
            raise ConfigInvalid("The same cluster token is named twice; withdraw the second one.")

    @classmethod
    def of(cls, token: Token) -> TokenSet:
        """A cluster with one token."""
        return cls((token,), token)

    @property
    def signing(self) -> Token:
        """The token that this process proves."""
        return self.tokens[0]

    def text(self) -> str:
        """The token file's content; of one token that was never replaced its one line. Keep it out of logs."""
        if len(self.tokens) == 1 and self.salts.key == self.signing.key:
            return self.signing.text + "\n"
        lines = [
            f"mooncache-tokens 1 {'incoming' if self.incoming else 'outgoing'}",
            *(token.text for token in self.tokens),
            f"mcr1.{self.salts.key.hex()}",
            _FILE_END,
        ]
        return "\n".join(lines) + "\n"


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


@lru_cache(maxsize=_TENANT_IDS_MAX)
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
    """Salt that keeps the blocks of tenants apart; without `cluster`, the root of the salts, it cannot be guessed.

    `client_salt` is what the client itself asked for (OpenAI's `cache_salt`): it separates further, inside the tenant.
    """
    data = _SALT_PREFIX + tenant.encode() + b"\0" + client_salt.encode()
    return keyed_hash(cluster.key, data)[:16].hex()


def public_salt(cluster: Token) -> str:
    """Salt of blocks that tenants agreed to share, from the root of the salts."""
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


class ValidTokens(Protocol):
    """The tokens that are valid now; they may be others at the next call."""

    @property
    def tokens(self) -> tuple[Token, ...]:
        """Those that are accepted, the one that signs first."""
        ...

    @property
    def signing(self) -> Token:
        """The one that this process proves."""
        ...

    @property
    def salts(self) -> Token:
        """The root of the salts."""
        ...

    def used(self, token: Token) -> None:
        """A caller proved it, or one that was made from it."""
        ...


class FixedTokens:
    """One token that is never replaced. Raises ConfigInvalid for a tenant's."""

    def __init__(self, token: Token) -> None:
        self.tokens = TokenSet.of(token).tokens
        self.signing = self.salts = token

    def used(self, token: Token) -> None:
        """It is not kept."""


class Authenticator:
    """Checks presented tokens against the cluster's secrets, in time that does not depend on them."""

    def __init__(self, cluster: Token | ValidTokens) -> None:
        self._cluster = FixedTokens(cluster) if isinstance(cluster, Token) else cluster

    def identify(self, authorization: str) -> Identity:
        """Who presents `Bearer <token>`. Raises Unauthenticated."""
        scheme, _, text = authorization.partition(" ")
        if scheme.lower() != "bearer" or not text:
            raise Unauthenticated("No token was sent; pass the cluster token or a tenant token.")
        token = parse_token(text)
        proven = None
        for cluster in self._cluster.tokens:  # each of them, whichever it is
            expected = cluster.key if token.admin else derive_tenant_key(cluster.key, token.tenant)
            if hmac.compare_digest(token.key, expected):
                proven = cluster
        if proven is None:
            raise Unauthenticated(
                "The token is not one of this cluster; check that both ends use the same token file."
            )
        self._cluster.used(proven)
        return Identity(token.tenant, token.admin)


def create_cluster_token(path: Path) -> Token:
    """Generate a cluster token and write it, mode 0600. Raises FileExistsError when the file is there
    already.

    The file appears whole or not at all: two services that start together agree on one token.
    """
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    token = new_cluster_token()
    partial = _write_beside(path, token.text + "\n")
    try:
        os.link(partial, path)  # refuses to replace, unlike rename
    finally:
        partial.unlink()
    return token


def new_cluster_token() -> Token:
    """A cluster token that was never used."""
    return Token(DEFAULT_TENANT, admin=True, key=secrets.token_bytes(SECRET_BYTES))


def replace_token_file(path: Path, tokens: TokenSet) -> None:
    """Put these in the place of what the file holds; readers see the one or the other. Raises OSError."""
    partial = _write_beside(path, tokens.text())
    try:
        os.replace(partial, path)
    except OSError:
        partial.unlink()
        raise


def _write_beside(path: Path, text: str) -> Path:
    partial = path.with_name(f".{path.name}.{os.getpid()}.{secrets.token_hex(4)}")
    descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        file.write(text.encode())
        file.flush()
        os.fsync(file.fileno())
    return partial


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


def parse_token_file(data: bytes, path: Path) -> TokenSet:
    """The tokens of a file; its content never appears in the error. Raises ConfigInvalid."""
    lines = data.decode("ascii", "replace").strip().split("\n")
    head = _FILE_HEAD.fullmatch(lines[0])
    if head is not None and (len(lines) < 3 or lines[-1] != _FILE_END):
        raise ConfigInvalid(
            f"The cluster token file {path} has no end: it is being written, or only half of it is there."
        )
    body = lines[1:-1] if head is not None else lines
    roots = [match for line in body[-1:] if (match := _ROOT.fullmatch(line))]
    matches = [_CLUSTER.fullmatch(line) for line in body[: len(body) - len(roots)]]
    if len(data) >= _FILE_BYTES_MAX or not 1 <= len(matches) <= TOKENS_MAX or None in matches:
        raise ConfigInvalid(
            f"The cluster token file {path} does not hold one line mcc1.<64 hex digits>, or two while the token is "
            "being replaced (`mooncache token rotate`)."
        )
    tokens = tuple(
        Token(DEFAULT_TENANT, admin=True, key=bytes.fromhex(match[1])) for match in matches if match
    )
    salts = Token(DEFAULT_TENANT, admin=True, key=bytes.fromhex(roots[0][1])) if roots else tokens[0]
    return TokenSet(tokens, salts, incoming=head is not None and head[1] == "incoming")


def load_token_set(path: Path) -> TokenSet:
    """Read the cluster's tokens. Raises ConfigInvalid for a missing, malformed or too widely readable file."""
    data, _ = read_private_file(path, "The cluster token file", _FILE_BYTES_MAX)
    return parse_token_file(data, path)


def load_cluster_token(path: Path) -> Token:
    """The token of the file that signs. Raises ConfigInvalid as `load_token_set`."""
    return load_token_set(path).signing


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
