"""Which Python starts the next processes of a one-machine cluster: the supervisor's own, or that of another version.

`mooncache upgrade` writes the path of its own interpreter into the state folder. The supervisor reads it at each start
of a process, so that the version changes process by process while the supervisor itself goes on. A version has its own
interpreter (a virtual environment), never files that change below a running process.
"""

from __future__ import annotations

import contextlib
import os
import stat
import sys
from pathlib import Path
from typing import Final

from mooncache.errors import ConfigInvalid
from mooncache.whole_file import write_whole

INTERPRETER_FILE: Final = "interpreter"
_BYTES_MAX: Final = 4096


def interpreter_of(state_dir: Path) -> str:
    """Path of the interpreter to start processes with; this process' own when none was chosen, or it is gone."""
    path = state_dir / INTERPRETER_FILE
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return sys.executable
    with open(descriptor, "rb") as file:
        status = os.fstat(file.fileno())
        theirs = status.st_uid != os.getuid() or status.st_mode & 0o022
        if not stat.S_ISREG(status.st_mode) or theirs:  # another user must not choose what runs here
            return sys.executable
        chosen = file.read(_BYTES_MAX).decode("utf-8", "replace").strip()
    return chosen if _runs(chosen) else sys.executable


def choose_interpreter(state_dir: Path, interpreter: str) -> None:
    """Have processes started with this interpreter from now on.

    Raises:
        ConfigInvalid: it is no program, or the folder cannot be written.
    """
    if not _runs(interpreter):
        raise ConfigInvalid(f"{interpreter} is no absolute path of a program.")
    try:
        write_whole(state_dir / INTERPRETER_FILE, interpreter + "\n")
    except OSError as error:
        raise ConfigInvalid(f"The state folder {state_dir} cannot be written: {error.strerror}.") from None


def forget_interpreter(state_dir: Path) -> None:
    """Start processes with the supervisor's own interpreter again."""
    with contextlib.suppress(OSError):
        (state_dir / INTERPRETER_FILE).unlink()


def _runs(interpreter: str) -> bool:
    return os.path.isabs(interpreter) and os.path.isfile(interpreter) and os.access(interpreter, os.X_OK)
