"""One act of an operator as it is kept: a line of JSON that names the hash of the line before it."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from typing import Final

import msgspec

ENTRY_BYTES_MAX: Final = 80 << 10
TEXT_CHARS_MAX: Final = 256
ARGUMENTS_MAX: Final = 32
DETAILS_MAX: Final = 16
DONE: Final = "OK"
"""The result of an act that did what it should."""
FIRST: Final = "0" * 64
"""What the very first entry names as the one before it."""


class AuditEntry(msgspec.Struct, kw_only=True, forbid_unknown_fields=False):
    """Who did what and when, and what came of it. `result` is OK or the name of an error."""

    unix_ms: int
    who: str
    what: str
    arguments: list[str]
    result: str
    details: dict[str, str] = {}
    previous: str = FIRST


_DECODER: Final = msgspec.json.Decoder(AuditEntry)


def trimmed(entry: AuditEntry) -> AuditEntry:
    """The entry within its limits, as printable text."""
    return AuditEntry(
        unix_ms=entry.unix_ms,
        who=_text(entry.who),
        what=_text(entry.what),
        arguments=[_text(each) for each in entry.arguments[:ARGUMENTS_MAX]],
        result=_text(entry.result),
        details={_text(name): _text(value) for name, value in list(entry.details.items())[:DETAILS_MAX]},
        previous=entry.previous,
    )


def _text(text: str) -> str:
    cut = text if len(text) <= TEXT_CHARS_MAX else text[: TEXT_CHARS_MAX - 3] + "..."
    return "".join(each if each.isprintable() else "?" for each in cut)


def line_of(entry: AuditEntry) -> bytes:
    """The entry as a line, without its end."""
    return msgspec.json.encode(entry)


def hash_of(line: bytes) -> str:
    """What the next entry says of this line."""
    return hashlib.sha256(line).hexdigest()


def read_entry(line: bytes) -> AuditEntry | None:
    """The entry of a line; None for what is none."""
    if len(line) > ENTRY_BYTES_MAX:
        return None
    try:
        return _DECODER.decode(line)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None


def first_break(lines: Iterable[bytes]) -> int | None:
    """Number (from 1) of the first line that does not follow from the one before it; None: all do.

    What the first line follows is not known where older files were deleted.
    """
    previous = ""
    for number, line in enumerate(lines, 1):
        entry = read_entry(line)
        if entry is None or (previous and entry.previous != previous):
            return number
        previous = hash_of(line)
    return None
