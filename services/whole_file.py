"""Small files that others read while they are written anew: whole with the former content, or whole with the new."""

from __future__ import annotations

import os
import secrets
from pathlib import Path

OWNER_ONLY = 0o600
AS_UMASK_SAYS = 0o666
PARTIAL = ".partial"
"""End of the name while a file is written; a process that was killed leaves one behind."""


def write_whole(path: Path, content: str | bytes, *, mode: int = OWNER_ONLY, to_disk: bool = False) -> None:
    """Write a file beside its place and move it there; after an error nothing is left beside it.

    Args:
        path: its folder must exist. A file that is there is replaced.
        content: text is written as UTF-8.
        mode: of the new file, less what the process's umask takes away.
        to_disk: the content is on the disk before it takes its place, so that a power cut leaves no empty file.

    Raises:
        OSError: it could not be written; the former file is as it was.
    """
    data = content.encode() if isinstance(content, str) else content
    partial = path.with_name(f".{path.name}.{secrets.token_hex(8)}{PARTIAL}")
    try:
        handle = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode)
        with open(handle, "wb") as opened:
            opened.write(data)
            if to_disk:
                opened.flush()
                os.fsync(opened.fileno())
        partial.replace(path)
    except OSError:
        partial.unlink(missing_ok=True)
        raise
