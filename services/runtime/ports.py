"""Ports to listen on that no outgoing connection takes in the meantime.

The kernel answers `bind` to port 0 from the range that also serves outgoing connections. Between that answer and the
moment at which a service listens there, any process may get the port for a connection of its own. Ports below the range
are for listeners alone, so they are tried first.
"""

from __future__ import annotations

import random
import socket
from pathlib import Path

_LOWEST = 15_000
_TRIES = 64
_OUTGOING = Path("/proc/sys/net/ipv4/ip_local_port_range")


def bind_free(probe: socket.socket, host: str) -> int:
    """Bind to a port of `host` that is free; return it. Raises OSError when none can be had."""
    try:
        first_outgoing = int(_OUTGOING.read_text(encoding="ascii").split()[0])
    except (OSError, ValueError, IndexError):
        first_outgoing = 0
    below = range(_LOWEST, first_outgoing)
    for candidate in random.SystemRandom().sample(below, min(_TRIES, len(below))):
        try:
            probe.bind((host, candidate))
        except OSError:
            continue
        return candidate
    probe.bind((host, 0))
    return int(probe.getsockname()[1])


def free_port(host: str = "127.0.0.1") -> int:
    """A port of `host` that was free a moment ago. Raises OSError when there is none."""
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        return bind_free(probe, host)
