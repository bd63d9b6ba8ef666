"""Where accounts are kept: a folder of this host, or a PostgreSQL database that several hosts share."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

SCHEMES: Final = ("postgresql://", "postgres://")
URL_CHARS_MAX: Final = 2048
BLOT: Final = "[redacted]"
# Of a database up to the last @: whoever forgot to encode a sign in a password must not read half of it in a log.
_OF_DATABASE: Final = re.compile(r"(\bpostgres(?:ql)?://[^\s/@:?]*:)\S*@")
_OF_OTHERS: Final = re.compile(r"(\b[a-zA-Z][a-zA-Z0-9+.-]*://[^\s/@:?]*:)[^\s/]*@")
_NAMED_PASSWORD: Final = re.compile(r"([?&](?:ssl)?password=)[^\s&]+")


@dataclass(frozen=True, slots=True)
class DatabaseUrl:
    """A URL as libpq takes it, `postgresql://user@host/name?sslmode=verify-full`. Its text shows no password."""

    secret_text: str = field(repr=False)

    def __post_init__(self) -> None:
        """Raises ValueError."""
        text = self.secret_text
        if not text.startswith(SCHEMES) or len(text) > URL_CHARS_MAX or not text.isprintable() or " " in text:
            raise ValueError(
                f"a database is written postgresql://USER@HOST/NAME, in at most {URL_CHARS_MAX} characters"
            )
        authority, _, rest = text.partition("://")[2].partition("/")
        if "@" in rest or authority.count("@") > 1:
            raise ValueError("the signs @ and / of a user or password are written %40 and %2F")

    def __str__(self) -> str:
        return without_passwords(self.secret_text)

    @property
    def has_password(self) -> bool:
        """Whether a password stands in it, which could also come from $PGPASSWORD or a passfile."""
        return str(self) != self.secret_text


def without_passwords(text: str) -> str:
    """The text with the passwords of URLs blotted out."""
    if "://" not in text:
        return text
    for pattern in (_OF_DATABASE, _OF_OTHERS):
        text = pattern.sub(rf"\1{BLOT}@", text)
    return _NAMED_PASSWORD.sub(rf"\1{BLOT}", text)


def place_of(value: object) -> object:
    """A folder with "~" resolved, or a database; None from an empty text. Raises ValueError."""
    if isinstance(value, str) and value.startswith(SCHEMES):
        return DatabaseUrl(value)
    if isinstance(value, (str, Path)):
        return Path(value).expanduser() if str(value) else None
    return value
