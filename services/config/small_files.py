"""Files that people write and hand over: read with a cap, decoded, and what is wrong said in a sentence with its line.

Nothing but the caller's own error leaves these functions. `what` names the kind of file ("configuration file"), so
that a sentence reads "The configuration file PATH is not TOML: ... (at line 3, column 7)."
"""

from __future__ import annotations

import difflib
import json
import tomllib
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Final

from mooncache.errors import MooncacheError

BYTES_MAX: Final = 1 << 20


def read_small(path: Path, what: str, error: type[MooncacheError], bytes_max: int = BYTES_MAX) -> bytes:
    """The bytes of a file of at most `bytes_max`. Raises `error`."""
    try:
        with path.open("rb") as file:
            data = file.read(bytes_max + 1)
    except OSError as refused:
        raise error(f"The {what} {path} cannot be read: {refused.strerror}.") from None
    if len(data) > bytes_max:
        raise error(f"The {what} {path} is larger than {_size(bytes_max)}.")
    return data


def read_toml(path: Path, what: str, error: type[MooncacheError]) -> dict[str, Any]:
    """The tables of a TOML file. Raises `error`."""
    data = read_small(path, what, error)
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as refused:
        line = data.count(b"\n", 0, refused.start) + 1
        raise error(
            f"The {what} {path} is not text in UTF-8: byte 0x{data[refused.start]:02x} on line {line}."
        ) from None
    return parse_toml(text, f"The {what} {path}", error)


def parse_toml(text: str, where: str, error: type[MooncacheError]) -> dict[str, Any]:
    """The tables of a TOML text; `where` begins the sentence. Raises `error`."""
    try:
        tables = tomllib.loads(text)
    except (ValueError, RecursionError) as refused:  # int() itself refuses numbers of thousands of digits
        raise error(f"{where} is not TOML: {refused}.") from None
    _refuse_large_integers(tables, where, error)
    return tables


def toml_value(value: object) -> str:
    """The value as TOML reads it back; what is neither a number, a truth value nor a list is text."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, (int, float)):
        return repr(value)
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(toml_value(item) for item in value) + "]"
    return json.dumps(str(value), ensure_ascii=False)


def _refuse_large_integers(tables: dict[str, object], where: str, error: type[MooncacheError]) -> None:
    """TOML promises 64 bits. tomllib reads more, which no float holds: its readers would have to expect that."""
    left: list[tuple[str, object]] = [("", tables)]
    while left:
        name, value = left.pop()
        if isinstance(value, dict):
            left += value.items()
        elif isinstance(value, list):
            left += [(name, item) for item in value]
        elif isinstance(value, int) and not -(1 << 63) <= value < 1 << 63:
            raise error(f"{where} is not TOML: {name} is a whole number of more than 64 bits.")


def nearest(name: str, known: Iterable[str], otherwise: str = "", cutoff: float = 0.5) -> str:
    """ "did you mean NAME?" when something known is near, else `otherwise` (default: all that is known)."""
    names = list(known)
    near = difflib.get_close_matches(name, names, n=1, cutoff=cutoff)
    return f"did you mean {near[0]}?" if near else otherwise or f"known are {', '.join(names)}."


def _size(size: int) -> str:
    return f"{size >> 20} MiB" if size >= 1 << 20 else f"{size} bytes"
