"""Ports to listen on that no other process takes before the server does.

The kernel answers `bind` to port 0 from the range that also serves outgoing connections. Between that answer and the
moment at which a service listens there, any process may get the port for a connection of its own. Ports below the range
are for listeners alone, so they are tried first.

Another process may pick the same port in that time, too. So whoever picks a port keeps a bound socket until the server
listens there. Linux lets a server with SO_REUSEADDR, as all here are, listen beside a socket that has the option and
does not listen itself; it refuses the port to a process that looks for a free one.
"""

from __future__ import annotations

import os
import random
import socket
import tempfile
from pathlib import Path

UNIX_PATH_MAX = 100
"""Bytes of the path of a unix socket: the kernel takes 107."""
LISTENER_FD = 3
"""The descriptor at which systemd, and `mooncache up`, pass a listening socket to a process."""
_LOWEST = 15_000
_TRIES = 64
_OUTGOING = Path("/proc/sys/net/ipv4/ip_local_port_range")
_SOCKET_NAME_MAX = 20


def hold_port(host: str, port: int = 0) -> socket.socket:
    """A socket that keeps `port` of `host`, or a free one for 0, for a server that has yet to listen there.

    Close it when the server listens, or when it has ended. Raises OSError when the port cannot be had.
    """
    held = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    try:
        if port:
            held.setsockopt(
                socket.SOL_SOCKET, socket.SO_REUSEADDR, 1
            )  # connections that ended there do not matter
            held.bind((host, port))
        else:
            _bind_free(held, host)
            held.setsockopt(
                socket.SOL_SOCKET, socket.SO_REUSEADDR, 1
            )  # from now on: a server may listen here
    except OSError:
        held.close()
        raise
    return held


def make_socket_folder() -> Path:
    """A new folder for unix sockets, whose names have at most 20 bytes.

    It lies in /tmp where the user's folder for temporary files is too deep for the path of a socket.
    """
    folder = Path(tempfile.mkdtemp(prefix="mooncache-"))
    if len(os.fsencode(folder)) + 1 + _SOCKET_NAME_MAX <= UNIX_PATH_MAX:
        return folder
    folder.rmdir()
    return Path(tempfile.mkdtemp(prefix="mooncache-", dir="/tmp"))


def passed_listener() -> socket.socket | None:
    """The listening socket that the parent passed (systemd's protocol, one socket); None when it passed none.

    Such a socket is the parent's, too: connections wait in its queue while the process is started again.
    """
    if os.environ.get("LISTEN_PID") != str(os.getpid()) or os.environ.get("LISTEN_FDS") != "1":
        return None
    try:
        passed = socket.socket(fileno=os.dup(LISTENER_FD))
        listens = passed.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
    except OSError:
        return None
    if not listens or passed.type != socket.SOCK_STREAM or passed.family == socket.AF_UNIX:
        passed.close()
        return None
    os.set_inheritable(LISTENER_FD, False)
    return passed


def host_in_url(host: str) -> str:
    """The host as it stands in a URL: an IPv6 address in brackets."""
    return f"[{host}]" if ":" in host and not host.startswith("[") else host


def port_of(held: socket.socket) -> int:
    """The number of the port that a socket is bound to."""
    return int(held.getsockname()[1])


def _bind_free(held: socket.socket, host: str) -> None:
    """Bind to a port that no other socket has, whatever its options."""
    try:
        first_outgoing = int(_OUTGOING.read_text(encoding="ascii").split()[0])
    except (OSError, ValueError, IndexError):
        first_outgoing = 0
    below = range(_LOWEST, first_outgoing)
    for candidate in random.SystemRandom().sample(below, min(_TRIES, len(below))):
        try:
            held.bind((host, candidate))
        except OSError:
            continue
        return
    held.bind((host, 0))
