"""A real store server, and what must be true of it after every test."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from mooncache import _native
from tests.data_plane.wire import SECRET

Start = Callable[..., Any]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """start(**settings) -> a serving StoreServer. At the end: stopped, nothing held, every invariant true."""
    servers: list[Any] = []

    def make(**settings: Any) -> Any:
        config = {
            "node_id": "node",
            "host_id": "host",
            "secret": SECRET,
            "incarnation": 7,
            "capacity_bytes": 32 << 20,
            "unix_path": str(tmp_path / f"s{len(servers)}" / "node.sock"),
        }
        server = _native.StoreServer(config | settings)
        server.start()
        servers.append(server)
        return server

    yield make
    for server in servers:
        server.stop(1.0)
        assert server.check() == ""
        stats = server.stats()
        held = (
            "connections_open",
            "pins_held",
            "reservations_held",
            "reserved_bytes",
            "parked_now",
            "store_pins",
        )
        assert {name: stats[name] for name in held} == dict.fromkeys(held, 0)
        assert stats["store_reservations"] == 0


@pytest.fixture
def server(start: Start) -> Any:
    return start()
