"""systemd, or what speaks its protocols, as the parent of a process: what the process says to it, and what it passes.

`tell` is sd_notify(3) and sd_pid_notify_with_fds(3), `passed_files` is sd_listen_fds_with_names(3). Without such a
parent both do nothing. systemd takes messages of a service's main process alone, as `NotifyAccess=` says by default.
"""

from __future__ import annotations

import array
import contextlib
import os
import select
import socket
from collections.abc import Sequence
from typing import Final

from mooncache.runtime.ports import LISTENER_FD

READY: Final = "READY=1"
STOPPING: Final = "STOPPING=1"
_PASSED_MAX: Final = 4096
_SEND_S: Final = 2.0


def has_service_manager() -> bool:
    """Whether something waits for what this process says."""
    return _address() is not None


def tell(*lines: str, files: Sequence[int] = ()) -> None:
    """Say something to the service manager, and pass it copies of descriptors; nothing without one.

    Raises:
        OSError: it does not take the message in time.
    """
    address = _address()
    if address is None:
        return
    control = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", files))] if files else []
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
        sender.settimeout(_SEND_S)
        sender.connect(address)
        sender.sendmsg(["\n".join(lines).encode()], control)


def wait_until_taken(timeout_s: float) -> bool:
    """Whether the service manager has read everything that was said before (its barrier, since systemd 246)."""
    ours, theirs = os.pipe2(os.O_CLOEXEC)
    try:
        try:
            tell("BARRIER=1", files=[theirs])
        finally:
            os.close(theirs)
        waiting = select.poll()
        waiting.register(ours, 0)  # poll reports the end of the other side in any case
        return bool(waiting.poll(timeout_s * 1000))
    finally:
        os.close(ours)


def passed_files() -> list[tuple[str, int]]:
    """The descriptors that the parent passed, with their names; they stay open, and no child gets them.

    Some may be listening sockets, for which `runtime.ports.passed_listener` looks.
    """
    if os.environ.get("LISTEN_PID") != str(os.getpid()):
        return []
    try:
        count = int(os.environ.get("LISTEN_FDS", ""))
    except ValueError:
        return []
    names = os.environ.get("LISTEN_FDNAMES", "").split(":")
    found = []
    for number in range(min(max(count, 0), _PASSED_MAX)):
        file = LISTENER_FD + number
        with contextlib.suppress(OSError):  # it was closed since
            os.set_inheritable(file, False)
            found.append((names[number] if number < len(names) else "", file))
    return found


def _address() -> str | None:
    """The socket's path, or its abstract name."""
    given = os.environ.get("NOTIFY_SOCKET", "")
    if given.startswith("/"):
        return given
    return "\0" + given[1:] if given.startswith("@") and len(given) > 1 else None
