"""Runs inside the test machine: the native server of one store node on rail rxb0. Ends with its input."""

from __future__ import annotations

import sys

from mooncache import _native

SECRET, PORT = bytes(range(32)), 7801

server = _native.StoreServer(
    {
        "node_id": "node",
        "secret": SECRET,
        "capacity_bytes": 64 << 20,
        "tcp_host": "127.0.0.1",
        "tcp_port": PORT,
        "rdma_devices": ["rxb0"],
    }
)
server.start()
print("serving", flush=True)
sys.stdin.read()
server.stop(1.0)
