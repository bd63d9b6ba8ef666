"""A node that speaks another data-plane version: refused with its own code, and bounded."""

from __future__ import annotations

import socket
import struct
import threading
from collections.abc import Iterator

import pytest

import mooncache
from mooncache import _native
from mooncache.auth import Token
from mooncache.errors import MooncacheError, NodeUnavailable

TOKEN = Token("default", admin=True, key=bytes(range(32))).text


@pytest.fixture
def future_node() -> Iterator[str]:
    """Answers every connection with a well-formed frame of version 9."""
    listener = socket.create_server(("127.0.0.1", 0))
    listener.settimeout(0.2)
    done = threading.Event()

    def serve() -> None:
        while not done.is_set():
            try:
                connection, _ = listener.accept()
            except TimeoutError:
                continue
            with connection:
                connection.settimeout(2)
                try:
                    connection.recv(4096)
                    meta = struct.pack("<HH", 0, 0) + bytes(16)
                    head = b"MCK1" + struct.pack("<BBHQQI", 9, 0x81, 0, 1, 0, len(meta))
                    check = _native.crc32c(meta, _native.crc32c(head))
                    connection.sendall(head + struct.pack("<I", check) + meta)
                    connection.recv(4096)
                except OSError:
                    continue

    thread = threading.Thread(target=serve)
    thread.start()
    yield f"127.0.0.1:{listener.getsockname()[1]}"
    done.set()
    thread.join(10)
    listener.close()


def test_version_skew_is_named(future_node: str) -> None:
    with mooncache.connect(nodes=[future_node], token=TOKEN, shm=False, timeout_s=3) as pool:
        with pytest.raises(MooncacheError) as caught:
            pool.put("k", b"v")
        assert caught.value.name == "VERSION_SKEW"
        with pytest.raises(MooncacheError) as caught:
            pool.ping(0)
        assert caught.value.name == "VERSION_SKEW"
        assert "version" in caught.value.message.lower()


def test_nobody_listens_is_bounded() -> None:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    with mooncache.connect(nodes=[f"127.0.0.1:{port}"], token=TOKEN, shm=False, timeout_s=2) as pool:
        with pytest.raises(MooncacheError) as caught:
            pool.put("k", b"v")
        assert caught.value.name in {"NODE_UNAVAILABLE", "DEADLINE_EXCEEDED"}
        with pytest.raises(NodeUnavailable):
            pool.match(["k"])
