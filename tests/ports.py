"""Ports for the servers that a test starts."""

from __future__ import annotations

import socket

from mooncache.runtime.ports import hold_port, port_of

_HELD: list[socket.socket] = []


def own_port() -> int:
    """A port that no test beside this one gets: this process keeps it until it ends."""
    _HELD.append(hold_port("127.0.0.1"))
    return port_of(_HELD[-1])
