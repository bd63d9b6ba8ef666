"""A second, independent speaker of the data-plane wire format, for tests: plain sockets and struct.

It says exactly what the tests want said, right or wrong; nothing here is shared with the product.
"""

from __future__ import annotations

import os
import socket
import struct
from dataclasses import dataclass
from typing import Any

from mooncache import _native

HEADER = struct.Struct("<IBBHQQII")
MAGIC = 0x314B434D
HELLO, AUTH, PUT, GET, LOOKUP, RELEASE, RESERVE, WRITE, COMMIT, ABORT = range(1, 11)
MATCH, REMOVE, PIN, UNPIN, STAT, READ, ATTACH, LIST, NODE_STAT, PING, ENDPOINT = range(11, 22)
WRITER = 1 << 2  # flag of HELLO's own
EXPOSE = 1 << 4  # flag of LOOKUP and RESERVE
SECRET = bytes(range(32))


def frame(
    opcode: int,
    meta: bytes = b"",
    payload: bytes = b"",
    *,
    request_id: int = 1,
    flags: int = 0,
    magic: int = MAGIC,
    version: int = 1,
    payload_bytes: int | None = None,
    meta_bytes: int | None = None,
    check: int | None = None,
) -> bytes:
    """One frame; the keyword arguments replace what an honest peer would say."""
    head = HEADER.pack(
        magic,
        version,
        opcode,
        flags,
        request_id,
        len(payload) if payload_bytes is None else payload_bytes,
        len(meta) if meta_bytes is None else meta_bytes,
        0,
    )[:28]
    if check is None:
        check = _native.crc32c(meta, _native.crc32c(head))
    return head + struct.pack("<I", check) + meta + payload


@dataclass(frozen=True)
class Reply:
    opcode: int
    request_id: int
    code: int
    message: str
    body: bytes
    payload: bytes


def text(value: str) -> bytes:
    data = value.encode()
    return struct.pack("<H", len(data)) + data


class Peer:
    """One connection. Closed by the garbage collector or close()."""

    def __init__(self, server: Any, unix: bool = False, timeout_s: float = 20.0) -> None:
        endpoints = server.endpoints()
        if unix:
            self.socket = socket.socket(socket.AF_UNIX)
            self.socket.settimeout(timeout_s)
            self.socket.connect(endpoints["unix_path"])
        else:
            self.socket = socket.create_connection((endpoints["tcp_host"], endpoints["tcp_port"]), timeout_s)
            self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def __enter__(self) -> Peer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self.socket.close()

    def send(self, data: bytes) -> None:
        self.socket.sendall(data)

    def receive(self, size: int) -> bytes:
        parts = bytearray()
        while len(parts) < size:
            part = self.socket.recv(size - len(parts))
            if not part:
                raise EOFError(f"closed after {len(parts)} of {size} bytes")
            parts += part
        return bytes(parts)

    def reply(self) -> Reply:
        head = self.receive(HEADER.size)
        magic, version, opcode, _, request_id, payload_bytes, meta_bytes, check = HEADER.unpack(head)
        assert (magic, version) == (MAGIC, 1)
        meta = self.receive(meta_bytes)
        assert check == _native.crc32c(meta, _native.crc32c(head[:28]))
        code, size = struct.unpack_from("<HH", meta)
        payload = self.receive(payload_bytes)
        return Reply(opcode, request_id, code, meta[4 : 4 + size].decode(), meta[4 + size :], payload)

    def call(self, opcode: int, meta: bytes = b"", payload: bytes = b"", **fields: Any) -> Reply:
        self.send(frame(opcode, meta, payload, **fields))
        return self.reply()

    def closed(self) -> bool:
        """True once the node has closed, whatever it still had to say."""
        try:
            while self.socket.recv(65536):
                pass
        except ConnectionError:
            pass
        return True

    def hello(
        self,
        tenant: str = "default",
        admin: bool = False,
        nonce: bytes | None = None,
        writer: bytes | None = None,
    ) -> Reply:
        """`writer`: what follows the flag that says who writes."""
        self.nonce = nonce or os.urandom(16)
        flags = int(admin) | (0 if writer is None else WRITER)
        meta = struct.pack("<HHI", 0, flags, os.getpid()) + self.nonce
        return self.call(HELLO, meta + text(tenant) + text("test") + text("0") + (writer or b""))

    def proof(self, challenge: bytes, tenant: str = "default", key: bytes | None = None) -> bytes:
        key = key or tenant_key(tenant)
        return bytes(
            _native.blake3_keyed(key, b"mooncache hello c v1" + challenge + self.nonce + tenant.encode())
        )

    def login(self, tenant: str = "default", admin: bool = False, writer: bytes | None = None) -> Peer:
        challenge = self.hello(tenant, admin, writer=writer)
        assert challenge.code == 0, challenge
        key = SECRET if admin else tenant_key(tenant)
        answer = self.call(AUTH, self.proof(challenge.body[:16], tenant, key))
        assert answer.code == 0, answer
        own = b"mooncache hello s v1" + self.nonce + challenge.body[:16] + tenant.encode()
        assert answer.body[:32] == _native.blake3_keyed(key, own)
        return self

    def put(self, items: list[tuple[bytes, bytes]], wait_ms: int = 0) -> list[int]:
        self.send(put_frame(items, wait_ms))
        return codes(self.reply())

    def get(self, *keys: bytes) -> list[tuple[int, bytes]]:
        reply = self.call(GET, get_meta(*keys))
        assert reply.code == 0, reply
        results, at = [], 0
        for i in range(len(keys)):
            code, _, _, crc, _, length = struct.unpack_from("<HBBIQQ", reply.body, 4 + 24 * i)
            block = reply.payload[at : at + length]
            at += length
            assert not block or _native.crc32c(block) == crc
            results.append((code, block))
        return results


def tenant_key(tenant: str) -> bytes:
    return bytes(_native.blake3_keyed(SECRET, b"mooncache tenant v1\0" + tenant.encode()))


def key_of(name: object) -> bytes:
    return bytes(_native.blake3(str(name).encode()))


def put_frame(items: list[tuple[bytes, bytes]], wait_ms: int = 0, **fields: Any) -> bytes:
    meta = struct.pack("<I", len(items))
    for key, block in items:
        meta += key + struct.pack("<QII", len(block), _native.crc32c(block), wait_ms)
    return frame(PUT, meta, b"".join(block for _, block in items), **fields)


def get_meta(*keys: bytes) -> bytes:
    return struct.pack("<I", len(keys)) + b"".join(key + struct.pack("<QQ", 0, 1 << 40) for key in keys)


def keys_meta(*keys: bytes) -> bytes:
    return struct.pack("<I", len(keys)) + b"".join(keys)


def codes(reply: Reply) -> list[int]:
    assert reply.code == 0, reply
    (count,) = struct.unpack_from("<I", reply.body)
    return list(struct.unpack_from(f"<{count}H", reply.body, 4))
