"""The code of an invitation, and the proofs that both machines make with it.

    K7QM-2F9X-W4TB-0HND-5VZC     the first group names the invitation and is no secret; the rest is 75 random bits and,
                                 as its last symbol, a check that finds typing errors before anything is sent

The code never travels. Each side proves that it knows it, by an HMAC over the certificate that the first machine
showed, a nonce of either side and the message itself. So a machine in between, which shows a certificate of its own,
gets a proof that is good for nothing; and the joining machine believes an answer only with the first machine's proof:
it trusts no certificate because it saw it first. The key is stretched (scrypt): who did get a proof in between would
have minutes to try 2**75 codes, at tens of milliseconds each.
"""

from __future__ import annotations

import hashlib
import hmac
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final

from mooncache.errors import InvalidArgument

RANDOM_BYTES: Final = 12
NONCE_BYTES: Final = 32
_SYMBOLS: Final = "0123456789ABCDEFGHJKMNPQRSTVWXYZ"  # no I, L, O, U: they are misread
_MISREAD: Final = str.maketrans({"O": "0", "I": "1", "L": "1", "-": None, " ": None})
_GROUP_CHARS: Final = 4
_CHARS: Final = 20
_TYPED_CHARS_MAX: Final = 64
_CHECK_PREFIX: Final = b"mooncache code check v1\0"
_KEY_PREFIX: Final = b"mooncache join key v1\0"
_PROOF_PREFIX: Final = b"mooncache join proof v1\0"
_SCRYPT: Final = {"n": 1 << 14, "r": 8, "p": 1, "dklen": 32}


class JoinSide(StrEnum):
    """Who makes a proof: a proof of one side is none of the other."""

    INVITING = "inviting"
    JOINING = "joining"


@dataclass(frozen=True, slots=True)
class JoinCode:
    """A code taken apart: `name` of the invitation, which may be shown, and the secret, which never shows in a repr."""

    name: str
    secret: str = field(repr=False)

    @property
    def text(self) -> str:
        """The code as a person types it. Keep it out of logs."""
        plain = self.name + self.secret
        symbols = plain + _check_symbol(plain)
        return "-".join(symbols[at : at + _GROUP_CHARS] for at in range(0, _CHARS, _GROUP_CHARS))

    def key(self) -> bytes:
        """The key of the proofs, 32 bytes; takes tens of milliseconds and 16 MiB on purpose."""
        return hashlib.scrypt(self.secret.encode(), salt=_KEY_PREFIX + self.name.encode(), **_SCRYPT)


def make_code(random_bytes: bytes) -> JoinCode:
    """A code from RANDOM_BYTES random bytes."""
    if len(random_bytes) != RANDOM_BYTES:
        raise InvalidArgument(f"A code is made from {RANDOM_BYTES} bytes; got {len(random_bytes)}.")
    number = int.from_bytes(random_bytes, "big")
    symbols = "".join(_SYMBOLS[number >> 5 * at & 31] for at in range(_CHARS - 1))
    return JoinCode(symbols[:_GROUP_CHARS], symbols[_GROUP_CHARS:])


def parse_code(text: str) -> JoinCode:
    """Take a typed code apart: case, hyphens and spaces do not matter. The text never appears in the error.

    Raises:
        InvalidArgument: it has another length or other symbols, or its check does not fit: a typing error.
    """
    symbols = text.upper().translate(_MISREAD) if len(text) <= _TYPED_CHARS_MAX else ""
    if len(symbols) != _CHARS or not set(symbols) <= set(_SYMBOLS):
        raise InvalidArgument(
            "That is no code of an invitation: it has five groups of four letters or digits, as `mooncache invite` "
            "prints it."
        )
    plain, check = symbols[:-1], symbols[-1]
    if not hmac.compare_digest(_check_symbol(plain), check):
        raise InvalidArgument("The code has a typing error: compare it with what `mooncache invite` printed.")
    return JoinCode(plain[:_GROUP_CHARS], plain[_GROUP_CHARS:])


def is_invitation_name(text: str) -> bool:
    """Whether the text can be the name of an invitation, the first group of its code."""
    return len(text) == _GROUP_CHARS and set(text) <= set(_SYMBOLS)


def join_proof(
    key: bytes, side: JoinSide, certificate: bytes, nonces: tuple[bytes, bytes], body: bytes
) -> bytes:
    """Proof of one message, 32 bytes.

    Args:
        key: of the code.
        certificate: the certificate (DER) that the inviting machine showed on this connection.
        nonces: of the inviting and of the joining machine.
    """
    parts = (side.encode(), hashlib.sha256(certificate).digest(), *nonces, hashlib.sha256(body).digest())
    data = b"".join(len(part).to_bytes(4, "big") + part for part in parts)
    return hmac.digest(key, _PROOF_PREFIX + data, "sha256")


def _check_symbol(symbols: str) -> str:
    return _SYMBOLS[hashlib.sha256(_CHECK_PREFIX + symbols.encode()).digest()[0] & 31]
