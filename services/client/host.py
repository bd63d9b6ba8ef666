"""Which machine this process runs on: processes with equal host ids may try shared memory with each other.

The boot id changes with every start of the kernel and is the same in all containers of a host; the hostname tells
machines apart whose image carries one boot id. A wrong guess costs one failed attach: TCP is used then.
"""

from __future__ import annotations

import functools
import hashlib
import pathlib
import socket

_BOOT_ID = pathlib.Path("/proc/sys/kernel/random/boot_id")


@functools.cache
def host_id() -> str:
    """A short name of this machine that stays the same until it boots again."""
    try:
        boot = _BOOT_ID.read_text(encoding="ascii").strip()
    except OSError:
        boot = ""
    digest = hashlib.blake2b(f"mooncache host v1\0{boot}\0{socket.gethostname()}".encode(), digest_size=8)
    return digest.hexdigest()


def host_name() -> str:
    """This machine's own name, for people."""
    return socket.gethostname()[:100]
