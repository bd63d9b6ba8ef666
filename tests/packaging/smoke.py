"""Run by test_wheel.py with the interpreter that has the wheel: imports, then one put and one get.

usage: smoke.py CHECKOUT. Fails when anything is imported from the checkout instead of site-packages.
"""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

MODULES = ("mooncache", "mooncache.master", "mooncache.store_node", "mooncache.cli", "mooncache._native")


def check_imports(checkout: Path) -> None:
    for name in MODULES:
        module = importlib.import_module(name)
        location = Path(module.__file__ or "").resolve()
        assert "site-packages" in location.parts, f"{name} comes from {location}"
        assert not location.is_relative_to(checkout), f"{name} comes from the checkout: {location}"


def has_rdma() -> None:
    """Whether it is there is asked of the machine, not of the build."""
    from mooncache import _native

    said = ""
    try:
        _native.rdma_ports({"rdma_library": "libnothing-of-this-name.so"})
    except RuntimeError as error:
        said = str(error)
    assert "libnothing-of-this-name.so cannot be opened" in said, said


def put_and_get() -> None:
    import mooncache
    from mooncache import _native
    from mooncache.auth import Token

    secret = bytes(range(32))
    server = _native.StoreServer({"node_id": "smoke", "secret": secret, "capacity_bytes": 16 << 20})
    server.start()
    try:
        address = f"smoke@127.0.0.1:{server.endpoints()['tcp_port']}"
        token = Token("default", admin=True, key=secret).text
        with mooncache.connect(nodes=[address], token=token, shm=False) as pool:
            block = bytes(range(256)) * 64
            assert pool.put("smoke", block)
            assert pool.get("smoke") == block
    finally:
        server.stop(5.0)


if __name__ == "__main__":
    check_imports(Path(sys.argv[1]).resolve())
    has_rdma()
    put_and_get()
    print("ok")
