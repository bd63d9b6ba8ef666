"""Files that processes write their output into: none grows forever, and the last part of what was cut off is kept."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import Final

LOG_BYTES_MAX: Final = 64 << 20
LOG_KEPT_BYTES: Final = 4 << 20


def trim(path: Path) -> None:
    """Cut a log that has grown too long while a process goes on writing it; its last part is put aside.

    The process appends (O_APPEND), so its next line begins the file anew.
    """
    with contextlib.suppress(OSError):
        if path.stat().st_size <= LOG_BYTES_MAX:
            return
        with path.open("rb") as log:
            log.seek(-LOG_KEPT_BYTES, os.SEEK_END)
            kept = log.read(LOG_KEPT_BYTES)
        aside = path.with_name(path.name + ".1")
        with os.fdopen(os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
            file.write(kept)
        os.truncate(path, 0)


def rotate(path: Path) -> None:
    """Put a log that has grown too long aside; one older one is kept."""
    with contextlib.suppress(OSError):
        if path.stat().st_size > LOG_BYTES_MAX:
            path.replace(path.with_name(path.name + ".1"))
