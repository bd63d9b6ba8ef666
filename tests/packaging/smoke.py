"""Run by test_wheel.py with the interpreter that has the wheel: imports, then one put and one get.

usage: smoke.py CHECKOUT. Fails when anything is imported from the checkout instead of site-packages.
"""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

MODULES = ("mooncache", "mooncache.master", "mooncache.store_node", "mooncache.cli", "mooncache._native")
NODE_ID = "smoke-node"
HOST_ID = "smoke-host"


def check_imports(checkout: Path) -> None:
    for name in MODULES:
        module = importlib.import_module(name)
        location = Path(module.__file__ or "").resolve()
        assert "site-packages" in location.parts, f"{name} comes from {location}"
        assert not location.is_relative_to(checkout), f"{name} comes from the checkout: {location}"


def put_and_get() -> None:
    from mooncache import _native

    secret = bytes(range(32))
    server = _native.StoreServer(
        {
            "node_id": NODE_ID,
            "host_id": HOST_ID,
            "secret": secret,
            "incarnation": 1,
            "capacity_bytes": 16 << 20,
            "tcp_host": "127.0.0.1",
            "tcp_port": 0,
            "unix_path": "",
        }
    )
    server.start()
    try:
        endpoints = server.endpoints()
        client = _native.Client({"secret": secret, "tenant": "default", "host_id": HOST_ID})
        node = {"index": 0, "node_id": NODE_ID, "host_id": HOST_ID, "incarnation": 1, "state": "active"}
        node |= {"tcp_host": endpoints["tcp_host"], "tcp_port": endpoints["tcp_port"], "unix_path": ""}
        client.set_map(1, [node | {"free_bytes": 16 << 20, "weight": 1.0}])
        key = _native.blake3(b"smoke")
        block = bytes(range(256)) * 64
        assert client.put([key], [block], 1, 10.0, None) == [(0, 0)]
        destination = bytearray(len(block))
        assert client.get([key], [destination], 10.0, None) == [(0, len(block), 0)]
        assert destination == block
        client.close()
    finally:
        server.stop(5.0)


if __name__ == "__main__":
    check_imports(Path(sys.argv[1]).resolve())
    put_and_get()
    print("ok")
