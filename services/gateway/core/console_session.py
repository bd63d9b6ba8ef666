"""Sessions of the console: a signed cookie that says who signed in, when, and until when it is good.

The gateway keeps no list of sessions, so every replica of a cluster knows them, also after a restart. A session is good
for an hour, is renewed while its page is open, and ends twelve hours after the sign-in in any case.
"""

from __future__ import annotations

import hashlib
import hmac
import re
from dataclasses import dataclass, replace
from typing import Final, NamedTuple

COOKIE: Final = "mooncache_console"
CLUSTER: Final = "cluster"
"""Who signed in with the cluster token. Other names are the beginning of a key's hash, or a tenant and its key."""
SESSION_S: Final = 3600
SESSION_S_MAX: Final = 12 * 3600
KEY_DIGITS: Final = 32
_SKEW_S: Final = 60  # replicas have clocks of their own
_COOKIE_CHARS_MAX: Final = 384
_COOKIES_CHARS_MAX: Final = 8192
_FORM: Final = re.compile(
    r"mcv1\.(cluster|[0-9a-f]{32}|t[0-9a-f]{2,126}-[0-9a-f]{2,64})\.([1-9][0-9]{0,11})\.([1-9][0-9]{0,11})\.([0-9a-f]{64})"
)


class TenantKey(NamedTuple):
    """A tenant that signed in, and the id of the key that it came with."""

    tenant: str
    key_id: str

    @property
    def who(self) -> str:
        """The name under which it is signed in."""
        return f"t{self.tenant.encode().hex()}-{self.key_id.encode().hex()}"


def tenant_key_of(who: str) -> TenantKey | None:
    """The tenant of a name; None: it is an operator's."""
    if not who.startswith("t"):
        return None
    tenant, _, key_id = who[1:].partition("-")
    try:
        return TenantKey(bytes.fromhex(tenant).decode(), bytes.fromhex(key_id).decode())
    except ValueError:
        return TenantKey("", "")  # opens nothing


@dataclass(frozen=True, slots=True)
class ConsoleSession:
    """Who signed in (`CLUSTER`, digits of a key's hash, or a tenant), when, and the end; seconds of Unix time."""

    who: str
    begun_s: int
    until_s: int


def begin(who: str, now_s: float) -> ConsoleSession:
    """A session that begins now."""
    return ConsoleSession(who, int(now_s), int(now_s) + SESSION_S)


def renewed(session: ConsoleSession, now_s: float) -> ConsoleSession | None:
    """The session with a later end, when less than half of its time is left and it may still go on."""
    until_s = min(int(now_s) + SESSION_S, session.begun_s + SESSION_S_MAX)
    if session.until_s - now_s >= SESSION_S / 2 or until_s <= session.until_s:
        return None
    return replace(session, until_s=until_s)


def cookie_value(key: bytes, session: ConsoleSession) -> str:
    """The session as a cookie has it."""
    text = f"mcv1.{session.who}.{session.begun_s}.{session.until_s}"
    return f"{text}.{_proof(key, text)}"


def session_of(key: bytes, cookies: str, now_s: float) -> ConsoleSession | None:
    """The session of a Cookie header; None without one that is signed with this key and still good."""
    value = _named(cookies)
    match = _FORM.fullmatch(value) if len(value) <= _COOKIE_CHARS_MAX else None
    if match is None:
        return None
    expected = _proof(key, value.rpartition(".")[0])
    if not hmac.compare_digest(expected, match[4]):
        return None
    session = ConsoleSession(match[1], int(match[2]), int(match[3]))
    if not session.begun_s - _SKEW_S <= now_s < session.until_s <= session.begun_s + SESSION_S_MAX:
        return None
    return session


def set_cookie(value: str, seconds: int, *, secure: bool) -> str:
    """The Set-Cookie header. Scripts cannot read the cookie, and other sites' pages cannot have it sent."""
    flags = "; Secure" if secure else ""
    return f"{COOKIE}={value}; Path=/console; Max-Age={seconds}; HttpOnly; SameSite=Strict{flags}"


def _named(cookies: str) -> str:
    """The first cookie of ours in a Cookie header; "" without one."""
    if len(cookies) > _COOKIES_CHARS_MAX:
        return ""
    for part in cookies.split(";"):
        name, _, value = part.strip().partition("=")
        if name == COOKIE:
            return value
    return ""


def _proof(key: bytes, text: str) -> str:
    return hmac.new(key, text.encode(), hashlib.sha256).hexdigest()
