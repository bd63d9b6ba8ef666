"""What operators did: a file of this host that only grows, mode 0600, or a table of the database (audit_table.py).

Every command that changes something writes there. Writers of the file take a lock, so that lines stay whole and each
names the one before it. At FILE_BYTES_MAX the file is renamed to `audit.jsonl.1` and so on; FILES_MAX of them are kept.
A line that a crash cut off is closed by the next writer and shown as damaged.
"""

from __future__ import annotations

import fcntl
import os
import stat
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Final

import msgspec

from mooncache.accounts import audit_table
from mooncache.accounts.core.audit import (
    ENTRY_BYTES_MAX,
    FIRST,
    AuditEntry,
    first_break,
    hash_of,
    line_of,
    trimmed,
)
from mooncache.accounts.database import AccountsPlace
from mooncache.errors import ConfigInvalid

AUDIT_FILE: Final = "audit.jsonl"
FILE_BYTES_MAX: Final = 64 << 20
FILES_MAX: Final = 10
LOCK_S: Final = 10.0
_LOOK_S: Final = 0.02
_LOCK_FILE: Final = "audit.lock"
_MODE: Final = 0o600


def append(place: AccountsPlace, entry: AuditEntry) -> None:
    """Add an entry, on disk when this returns. Raises ConfigInvalid, AccountsUnavailable."""
    if not isinstance(place, Path):
        audit_table.append(place, entry)
    else:
        _append(place, entry)


def lines(place: AccountsPlace) -> Iterator[bytes]:
    """All lines, the oldest first, each of ENTRY_BYTES_MAX + 1 bytes at most.

    Raises ConfigInvalid, AccountsUnavailable.
    """
    return _lines(place) if isinstance(place, Path) else audit_table.lines(place)


def first_break_of(place: AccountsPlace) -> int | None:
    """Number (from 1) of the first line that does not follow from the one before it; None: all do.

    In a database also that of a line that is missing at the end. Raises ConfigInvalid, AccountsUnavailable.
    """
    if isinstance(place, Path):
        return first_break(_lines(place))
    end = audit_table.end_hash(place)
    count, has_end = 0, not end

    def watched() -> Iterator[bytes]:
        nonlocal count, has_end
        for line in audit_table.lines(place):
            count, has_end = count + 1, has_end or hash_of(line) == end
            yield line

    broken = first_break(watched())
    return broken if broken is not None or has_end else count + 1


def _append(folder: Path, entry: AuditEntry) -> None:
    path = folder / AUDIT_FILE
    try:
        for each in (folder.parent, folder):
            each.mkdir(mode=0o700, parents=True, exist_ok=True)
        with open(os.open(folder / _LOCK_FILE, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, _MODE), "rb") as lock:
            _take(lock, path)
            _rotate(path)
            handle = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, _MODE)
            with open(handle, "r+b", buffering=0) as opened:
                _check_private(path, os.fstat(handle))
                last, whole = _last_line(opened)
                if not last:
                    last, _ = _last_line_of(path.with_name(f"{AUDIT_FILE}.1"))
                entry = msgspec.structs.replace(trimmed(entry), previous=hash_of(last) if last else FIRST)
                data = line_of(entry) + b"\n"
                size = os.fstat(handle).st_size
                if os.write(handle, data if whole else b"\n" + data) < len(data):
                    os.ftruncate(handle, size)
                    raise OSError(28, "No space left on device")
                os.fsync(handle)
    except OSError as error:
        raise ConfigInvalid(f"The audit log {path} cannot be written: {error.strerror}.") from None


def _lines(folder: Path) -> Iterator[bytes]:
    names = [f"{AUDIT_FILE}.{number}" for number in range(FILES_MAX - 1, 0, -1)]
    for name in (*names, AUDIT_FILE):
        path = folder / name
        try:
            with path.open("rb") as opened:
                _check_private(path, os.fstat(opened.fileno()))
                while line := opened.readline(ENTRY_BYTES_MAX + 1):
                    yield line.rstrip(b"\n")
        except FileNotFoundError:
            continue
        except OSError as error:
            raise ConfigInvalid(f"The audit log {path} cannot be read: {error.strerror}.") from None


def _take(lock: IO[bytes], path: Path) -> None:
    until_s = time.monotonic() + LOCK_S
    while True:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            if time.monotonic() > until_s:
                raise ConfigInvalid(f"The audit log {path} is held by another process.") from None
            time.sleep(_LOOK_S)


def _rotate(path: Path) -> None:
    if not path.exists() or path.stat().st_size < FILE_BYTES_MAX:
        return
    for number in range(FILES_MAX - 1, 0, -1):
        older = path.with_name(f"{AUDIT_FILE}.{number - 1}") if number > 1 else path
        if older.exists():
            os.replace(older, path.with_name(f"{AUDIT_FILE}.{number}"))


def _last_line_of(path: Path) -> tuple[bytes, bool]:
    if not path.exists():
        return b"", True
    with path.open("rb") as opened:
        return _last_line(opened)


def _last_line(opened: IO[bytes]) -> tuple[bytes, bool]:
    """The last line without its end, and whether it has one."""
    size = opened.seek(0, os.SEEK_END)
    opened.seek(max(0, size - ENTRY_BYTES_MAX - 2))
    tail = opened.read(ENTRY_BYTES_MAX + 2)
    return tail.rstrip(b"\n").rpartition(b"\n")[2], not tail or tail.endswith(b"\n")


def _check_private(path: Path, status: os.stat_result) -> None:
    if not stat.S_ISREG(status.st_mode) or status.st_mode & 0o077:
        raise ConfigInvalid(
            f"The audit log {path} is no regular file or others may use it; run: chmod 600 {path}"
        )
