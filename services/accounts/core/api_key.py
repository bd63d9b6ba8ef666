"""API keys that an operator makes: their text, what they may be used for, and when they end.

    mca1.<16 hex: id>.<64 hex: secret>

The id is no secret: lists, logs and usage name it. Of the whole text only the SHA-256 is kept. A secret has 256 random
bits, so a fast hash is enough: there is nothing to guess, unlike with passwords.
"""

from __future__ import annotations

import hashlib
import hmac
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Final

from mooncache.auth import check_tenant_name
from mooncache.errors import InvalidArgument

ID_BYTES: Final = 8
SECRET_BYTES: Final = 32
NAME_CHARS_MAX: Final = 64
RATE_MAX: Final = 1e12
_TEXT: Final = re.compile(r"mca1\.([0-9a-f]{16})\.[0-9a-f]{64}")
_ID: Final = re.compile(r"[0-9a-f]{16}")
_NAME: Final = re.compile(r"[\w .:@/+-]*")
_NO_DIGEST: Final = bytes(32)


class KeyScope(StrEnum):
    """What a key may be used for."""

    INFERENCE = "inference"
    """Completions, and the list of models."""
    BATCHES = "batches"
    """Files and batches, and the list of models."""
    USAGE = "usage"
    """What the tenant has used."""
    METRICS = "metrics"
    """The gateway's /metrics, which are about all tenants together."""


TENANT_SCOPES: Final = frozenset({KeyScope.INFERENCE, KeyScope.BATCHES, KeyScope.USAGE})
"""What tenant tokens and keys of the key file may do."""
ALL_SCOPES: Final = frozenset(KeyScope)


class KeyState(StrEnum):
    """Whether a key opens something."""

    VALID = "valid"
    EXPIRED = "expired"
    REVOKED = "revoked"


@dataclass(frozen=True, slots=True)
class ApiKeyRecord:
    """A key as it is kept. Times are Unix seconds; `expires_s` and `revoked_s` are 0 for never."""

    key_id: str
    tenant: str
    scopes: frozenset[KeyScope]
    digest: bytes = field(repr=False)
    created_s: int
    name: str = ""
    expires_s: int = 0
    revoked_s: int = 0
    requests_per_minute: float = 0  # 0: as the gateway's setting says
    tokens_per_minute: float = 0
    created_by: str = ""

    @property
    def end_s(self) -> int:
        """When it ends, or has ended; 0: never."""
        ends = [each for each in (self.expires_s, self.revoked_s) if each]
        return min(ends, default=0)

    def state(self, now_s: float) -> KeyState:
        """Whether it opens something now."""
        if self.revoked_s and now_s >= self.revoked_s:
            return KeyState.REVOKED
        return KeyState.EXPIRED if self.expires_s and now_s >= self.expires_s else KeyState.VALID

    def described(self, now_s: float) -> dict[str, Any]:
        """All that may be shown of it, as commands and the gateway's API answer."""
        return {
            "id": self.key_id,
            "tenant": self.tenant,
            "name": self.name,
            "scopes": sorted(self.scopes),
            "state": self.state(now_s),
            "created_unix_s": self.created_s,
            "created_by": self.created_by,
            "expires_unix_s": self.expires_s,
            "revoked_unix_s": self.revoked_s,
            "requests_per_minute": self.requests_per_minute,
            "tokens_per_minute": self.tokens_per_minute,
        }

    def check(self) -> None:
        """Raises InvalidArgument for what no key has."""
        check_tenant_name(self.tenant)
        if not _ID.fullmatch(self.key_id) or len(self.digest) != len(_NO_DIGEST):
            raise InvalidArgument("A key has an id of 16 hex digits and a hash of 32 bytes.")
        if not self.scopes:
            raise InvalidArgument(f"A key needs at least one scope: {', '.join(KeyScope)}.")
        if len(self.name) > NAME_CHARS_MAX or not _NAME.fullmatch(self.name):
            raise InvalidArgument(
                f"A key's name has at most {NAME_CHARS_MAX} letters, digits, spaces and any of . : @ / + _ -."
            )
        if self.created_s < 0 or self.expires_s < 0 or self.revoked_s < 0:
            raise InvalidArgument("The times of a key are not negative.")
        for rate in (self.requests_per_minute, self.tokens_per_minute):
            if not 0 <= rate < RATE_MAX:
                raise InvalidArgument(f"A limit of a key is from 0 to {RATE_MAX:g}.")


def key_text(id_bytes: bytes, secret: bytes) -> str:
    """The text of a key from random bytes."""
    return f"mca1.{id_bytes.hex()}.{secret.hex()}"


def id_of(text: str) -> str:
    """The id in a key's text, "" in what is none."""
    match = _TEXT.fullmatch(text)
    return match[1] if match else ""


def digest_of(text: str) -> bytes:
    """What is kept of a key's text."""
    return hashlib.sha256(text.encode("utf-8", "replace")).digest()


def is_text_of(record: ApiKeyRecord | None, text: str) -> bool:
    """Whether a text is the key; takes as long for an id that does not exist."""
    expected = record.digest if record is not None else _NO_DIGEST
    return hmac.compare_digest(expected, digest_of(text)) and record is not None


def scopes_of(words: Iterable[str]) -> frozenset[KeyScope]:
    """Scopes by name. Raises InvalidArgument."""
    try:
        return frozenset(KeyScope(word) for word in words)
    except ValueError as error:
        raise InvalidArgument(f"{error}; the scopes are {', '.join(KeyScope)}.") from None


def is_key_id(text: str) -> bool:
    """Whether a text has the form of a key's id."""
    return _ID.fullmatch(text) is not None
