"""Who a client is to the nodes that it writes to: the writer of its blocks.

A writer is one process under one name. It draws a random number when it first says who it is; all clients of the
process with the same name share it, also those that act for other tenants, and a child of fork() draws its own.
"""

from __future__ import annotations

import os
import secrets
import threading
import time
from typing import Final

TEXT_BYTES_MAX: Final = 64
"""Longer names are cut; what is no printable ASCII is a question mark at the nodes."""

_lock = threading.Lock()
_numbers: dict[tuple[int, str, str], tuple[int, int]] = {}
_NUMBERS_MAX: Final = 1024


def writer_settings(instance: str, build: str) -> dict[str, object]:
    """What the native client says at its hello, for a process that is called `instance` and runs `build`."""
    instance, build = (_short(text) for text in (instance, build))
    with _lock:
        key = (os.getpid(), instance, build)
        if key not in _numbers:
            while len(_numbers) >= _NUMBERS_MAX:
                _numbers.pop(next(iter(_numbers)))
            _numbers[key] = secrets.randbits(64) or 1, round(time.time())
        number, started_unix_s = _numbers[key]
    return {
        "writer_id": number,
        "writer_instance": instance,
        "writer_build": build,
        "writer_started_unix_s": started_unix_s,
    }


def writer_number(instance: str, build: str) -> int:
    """The number of the writer that `writer_settings` names."""
    number = writer_settings(instance, build)["writer_id"]
    assert isinstance(number, int)
    return number


def _short(text: str) -> str:
    return text.encode("ascii", "replace")[:TEXT_BYTES_MAX].decode()
