"""The file by which an engine's side says to the worker beside it what its blocks are: the passport, and facts."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

from mooncache.kvcache.passport import Passport
from mooncache.whole_file import AS_UMASK_SAYS, write_whole


def write_passport(path: Path, passport: Passport, mode: int = AS_UMASK_SAYS, /, **facts: object) -> None:
    """Write the file whole or not at all: a reader never sees half of it. `mode`: its rights, less the umask.

    Raises:
        OSError: the folder cannot be written.
    """
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    write_whole(path, json.dumps({"passport": asdict(passport), **facts}), mode=mode)
