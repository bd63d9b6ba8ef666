"""Control calls without the secret on the wire: every call proves that its sender knows a token, every answer too.

Idea: caller and service share a key (derived from the token). A call carries HMAC-SHA256 over who calls, a nonce of
the service, a number that was never used before, the method, and the digest of the request; the answer carries one
over that call's MAC, its code, and the digest of the response. What passes on the wire is of no use a second time:

- another method, request or service: the MAC does not fit (the nonce is drawn by one life of one service);
- the same call again: its number is used up. Numbers are remembered for each session of a caller under each nonce;
- a call that was held back: nonces change every NONCE_S seconds of the service's own monotonic clock, and the last two
  are taken. No wall clock, no clock of the caller is involved;
- an answer of another process: without the key it cannot be made.

A caller that has no nonce yet, or an old one, gets the present one in an answer that is proven like every other,
nothing having been carried out, and calls again. Memory is bounded: only calls that were proven are remembered, and a
nonce under which too many sessions are known makes room for the next one early.

    authorization    mcp1 <"*" or tenant> <nonce> <session> <number> <MAC>
    mooncache-proof  <nonce to use next> <MAC>                               (trailing metadata of the answer)

docs/grpc.md says the same for callers in other languages, with examples that tests compare. A port with TLS may also
take the control key itself as `Bearer mck1.…`, from tools that sign nothing. The answers then prove nothing; the
server's certificate does.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import itertools
import re
import secrets
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Final

from mooncache import auth
from mooncache.errors import Unauthenticated

METADATA_KEY: Final = "mooncache-proof"
NONCE_S: Final = 30.0
SESSIONS_MAX: Final = 16_384
WINDOW: Final = 1024  # calls of one session that may overtake another one
STALE: Final = (
    -1
)  # in place of a code: nothing was carried out, call again with the nonce that comes with this
NO_NONCE: Final = "-"
_BEARER: Final = "bearer "
_SCHEME: Final = "mcp1"
_ALL_TENANTS: Final = "*"
_WINDOW_MASK: Final = (1 << WINDOW) - 1
_HEADER: Final = re.compile(
    r"mcp1 (\*|[a-z0-9][a-z0-9_.-]{0,62}) (-|[0-9a-f]{32}) ([0-9a-f]{32}) ([0-9]{1,19}) ([0-9a-f]{64})"
)
_ANSWER: Final = re.compile(r"([0-9a-f]{32}) ([0-9a-f]{64})")
_CALL_PREFIX: Final = b"mooncache call v1\0"
_ANSWER_PREFIX: Final = b"mooncache answer v1\0"
_THREAD_BYTES_MIN: Final = 256 << 10  # hashing more would hold up the event loop


async def digest(data: bytes) -> bytes:
    """SHA-256; of much data in a thread."""
    if len(data) < _THREAD_BYTES_MIN:
        return hashlib.sha256(data).digest()
    return await asyncio.to_thread(lambda: hashlib.sha256(data).digest())


def call_mac(key: bytes, signed: str, path: str, request_digest: bytes) -> bytes:
    """What a call carries: an HMAC over the fields before it, the method's path and the SHA-256 of the request."""
    text = f"{signed} {path}".encode()
    return hmac.digest(key, _CALL_PREFIX + text + b"\0" + request_digest, "sha256")


def answer_mac(key: bytes, mac: bytes, code: int, nonce: str, answer_digest: bytes) -> bytes:
    """What an answer carries, bound to the call's own `mac`."""
    text = f"{code} {nonce}".encode()
    return hmac.digest(key, _ANSWER_PREFIX + mac + text + b"\0" + answer_digest, "sha256")


@dataclass(frozen=True, slots=True)
class SignedCall:
    """What to send as `authorization`, and what the answer has to be bound to."""

    authorization: str
    mac: bytes = field(repr=False)
    key: bytes = field(repr=False)


class Prover:
    """The caller's side: one for each channel, used from one event loop.

    A source of tokens is asked at each call, so that calls prove the token that is there then.
    """

    def __init__(self, token: str | auth.TokenSource) -> None:
        self._source = token
        self._text = ""
        self._token: auth.Token | None = None
        self._key = b""
        self._session = secrets.token_hex(16)
        self._numbers = itertools.count(1)
        self._nonce = NO_NONCE

    def sign(self, path: str, request_digest: bytes) -> SignedCall:
        """Sign one call; a repeat needs a new signature. Raises Unauthenticated for a text that is not a token."""
        token = self._present()
        who = _ALL_TENANTS if token.admin else token.tenant
        signed = f"{_SCHEME} {who} {self._nonce} {self._session} {next(self._numbers)}"
        mac = call_mac(self._key, signed, path, request_digest)
        return SignedCall(f"{signed} {mac.hex()}", mac, self._key)

    def _present(self) -> auth.Token:
        text = auth.text_of(self._source)
        if self._token is None or text != self._text:
            self._token = auth.parse_token(text)
            self._text, self._key = text, auth.derive_control_key(self._token.key)
        return self._token

    def proves(self, call: SignedCall, code: int, answer_digest: bytes, proof: str) -> bool:
        """Whether an answer comes from who knows the key; learns the nonce that it brings."""
        match = _ANSWER.fullmatch(proof)
        if match is None:
            return False
        expected = answer_mac(call.key, call.mac, code, match[1], answer_digest)
        if not hmac.compare_digest(expected, bytes.fromhex(match[2])):
            return False
        self._nonce = match[1]
        return True


class Window:
    """Which numbers of a session were used: bit `i` of `_used` stands for `_top - i`; older ones count as used."""

    __slots__ = ("_top", "_used")

    def __init__(self) -> None:
        self._top = 0
        self._used = 0

    def take(self, number: int) -> bool:
        """Use a number up; False when it was used, or is too old to know."""
        ahead = number - self._top
        if ahead > 0:
            self._used = (self._used << ahead | 1) & _WINDOW_MASK if ahead < WINDOW else 1
            self._top = number
            return True
        if -ahead >= WINDOW or self._used >> -ahead & 1:
            return False
        self._used |= 1 << -ahead
        return True


class _Generation:
    """One nonce, and what was used up under it."""

    __slots__ = ("nonce", "sessions", "since_s")

    def __init__(self, now_s: float) -> None:
        self.nonce = secrets.token_hex(16)
        self.since_s = now_s
        self.sessions: dict[tuple[str, str], Window] = {}


class Admitted:
    """One call as the service sees it: who it is from, or why not; seals the answer."""

    __slots__ = ("_key", "_mac", "_nonce", "identity", "refusal", "stale")

    def __init__(self, nonce: str, refusal: str = "", key: bytes = b"", mac: bytes = b"") -> None:
        self._nonce, self._key, self._mac = nonce, key, mac
        self.identity: auth.Identity | None = None
        self.refusal = refusal
        self.stale = False

    def identify(self) -> auth.Identity:
        """Who calls. Raises Unauthenticated."""
        if self.identity is None:
            raise Unauthenticated(self.refusal)
        return self.identity

    def seal(self, code: int, answer_digest: bytes) -> tuple[tuple[str, str], ...]:
        """Metadata that proves the answer; none for a caller without a key in common."""
        if not self._key:
            return ()
        mac = answer_mac(self._key, self._mac, code, self._nonce, answer_digest)
        return ((METADATA_KEY, f"{self._nonce} {mac.hex()}"),)


class Gate:
    """The service's side: one for each port. `now_s` is a monotonic clock.

    Args:
        bearer: take a control key as a bearer token, too. For ports with TLS alone: others cannot read along there.
    """

    def __init__(
        self,
        cluster: auth.Token | auth.ValidTokens,
        now_s: Callable[[], float],
        *,
        sessions_max: int = SESSIONS_MAX,
        bearer: bool = False,
    ) -> None:
        self._now_s = now_s
        self._bearer = bearer
        self._sessions_max = sessions_max
        self._present = _Generation(now_s())
        self._before: _Generation | None = None

        self._cluster = auth.FixedTokens(cluster) if isinstance(cluster, auth.Token) else cluster

        @lru_cache(maxsize=4096)
        def key_of(who: str, secret: bytes) -> bytes:
            admin = who == _ALL_TENANTS
            return auth.derive_control_key(secret if admin else auth.derive_tenant_key(secret, who))

        self._key_of = key_of

    def _proven(self, who: str, fits: Callable[[bytes], bool]) -> bytes:
        """The caller's key that fits, of all valid tokens; empty when there is none. Each one is tried, whichever
        it is."""
        found = b""
        for token in self._cluster.tokens:
            key = self._key_of(who, token.key)
            if fits(key):
                found = key
                self._cluster.used(token)
        return found

    def admit(self, authorization: str, path: str, request_digest: bytes) -> Admitted:
        """Look at one call; never raises. A number is used up by a call that was proven, and by no other."""
        self._turn()
        match = _HEADER.fullmatch(authorization)
        if match is None and self._bearer and _is_bearer(authorization):
            return self._admit_bearer(authorization[len(_BEARER) :])
        if match is None:
            return Admitted(self._present.nonce, _wrong_form(authorization))
        who, nonce, session, number, mac_text = match.groups()
        mac = bytes.fromhex(mac_text)
        signed = authorization.rpartition(" ")[0]
        key = self._proven(
            who, lambda key: hmac.compare_digest(mac, call_mac(key, signed, path, request_digest))
        )
        if not key:
            return Admitted(
                self._present.nonce,
                "The proof does not fit the token of this cluster; check that both ends use the same token file.",
            )
        admitted = Admitted(
            self._present.nonce, "The proof of the call is stale; the call was not carried out.", key, mac
        )
        generation = self._generation(nonce)
        if generation is None or not generation.sessions.setdefault((who, session), Window()).take(
            int(number)
        ):
            admitted.stale = True
        else:
            admitted.identity = _identity(who)
        return admitted

    def _admit_bearer(self, text: str) -> Admitted:
        """A call with the control key in it; the answer is not proven, because the caller asked for no proof."""
        try:
            presented = auth.parse_control_key(text)
        except Unauthenticated as error:
            return Admitted(self._present.nonce, error.message)
        who = _ALL_TENANTS if presented.tenant is None else presented.tenant
        admitted = Admitted(self._present.nonce, "The control key is not one of this cluster.")
        if self._proven(who, lambda key: hmac.compare_digest(presented.key, key)):
            admitted.identity = _identity(who)
        return admitted

    def _generation(self, nonce: str) -> _Generation | None:
        for generation in (self._present, self._before):
            if generation is not None and generation.nonce == nonce:
                return generation
        return None

    def _turn(self) -> None:
        now_s = self._now_s()
        old_s = now_s - self._present.since_s
        if old_s >= NONCE_S or len(self._present.sessions) >= self._sessions_max:
            self._before = self._present if old_s < 2 * NONCE_S else None
            self._present = _Generation(now_s)


def _identity(who: str) -> auth.Identity:
    admin = who == _ALL_TENANTS
    return auth.Identity(auth.DEFAULT_TENANT if admin else who, admin=admin)


def _is_bearer(authorization: str) -> bool:
    return authorization[: len(_BEARER)].lower() == _BEARER


def _wrong_form(authorization: str) -> str:
    if not authorization:
        return "The call carries no proof of a token."
    if _is_bearer(authorization) and authorization[len(_BEARER) :].startswith("mck1."):
        return (
            "A control key was sent as a bearer token to a port that takes none (no TLS, or grpc.bearer is off), and "
            "may have been seen on the way; make a new cluster token, and send a proof (docs/grpc.md)."
        )
    if _is_bearer(authorization):
        return (
            "A token was sent instead of a proof that the caller knows it, and may have been seen on the way; "
            "make a new cluster token and use a client of this version."
        )
    return "The proof has no known form; the caller may be of another version."
