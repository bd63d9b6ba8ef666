"""The data plane's wire format spoken by somebody else: plain Python, nothing of the product in it.

CRC32C and the one block of BLAKE3 that the handshake needs are written out here from their specifications,
so that a mistake shared by both sides cannot hide.
"""

from __future__ import annotations

import os
import socket
import struct

HEADER = struct.Struct("<IBBHQQII")
MAGIC, VERSION = 0x314B434D, 1
HELLO, AUTH, PUT, GET, LOOKUP, RELEASE, RESERVE, COMMIT, ENDPOINT = 1, 2, 3, 4, 5, 6, 7, 9, 21
EXPOSE, ONE_SIDED = 16, 1
ADDRESS = struct.Struct("<HHBBBBII16s")
EXPOSURE = struct.Struct("<HHIQ8I")


def _crc_table() -> list[int]:
    table = []
    for byte in range(256):
        value = byte
        for _ in range(8):
            value = value >> 1 ^ (0x82F63B78 if value & 1 else 0)
        table.append(value)
    return table


_TABLE = _crc_table()


def crc32c(data: bytes, before: int = 0) -> int:
    """RFC 3720, appendix B.4."""
    value = before ^ 0xFFFFFFFF
    for byte in data:
        value = value >> 8 ^ _TABLE[(value ^ byte) & 255]
    return value ^ 0xFFFFFFFF


_IV = (0x6A09E667, 0xBB67AE85, 0x3C6EF372, 0xA54FF53A)
_ORDER = (2, 6, 3, 10, 7, 0, 4, 13, 1, 11, 12, 5, 9, 14, 15, 8)
_QUARTERS = (
    *((0, 4, 8, 12), (1, 5, 9, 13), (2, 6, 10, 14), (3, 7, 11, 15)),
    *((0, 5, 10, 15), (1, 6, 11, 12), (2, 7, 8, 13), (3, 4, 9, 14)),
)
_KEYED_WHOLE_CHUNK = 1 | 2 | 8 | 16  # first block, last block, root, keyed


def blake3_keyed(key: bytes, data: bytes) -> bytes:
    """BLAKE3's keyed hash of at most 64 bytes: one compression."""
    assert len(data) <= 64
    mask = 0xFFFFFFFF
    chaining = struct.unpack("<8I", key)
    words = list(struct.unpack("<16I", data.ljust(64, b"\0")))
    v = [*chaining, *_IV, 0, 0, len(data), _KEYED_WHOLE_CHUNK]

    def turn(value: int, by: int) -> int:
        return (value >> by | value << (32 - by)) & mask

    for _ in range(7):
        for number, (a, b, c, d) in enumerate(_QUARTERS):
            for word, first, second in ((words[2 * number], 16, 12), (words[2 * number + 1], 8, 7)):
                v[a] = (v[a] + v[b] + word) & mask
                v[d] = turn(v[d] ^ v[a], first)
                v[c] = (v[c] + v[d]) & mask
                v[b] = turn(v[b] ^ v[c], second)
        words = [words[i] for i in _ORDER]
    return struct.pack("<8I", *(v[i] ^ v[i + 8] for i in range(8)))


def text(value: str) -> bytes:
    return struct.pack("<H", len(value)) + value.encode()


class Connection:
    """One connection as tenant "default", proved with the cluster's secret."""

    def __init__(self, port: int, secret: bytes, tenant: str = "default") -> None:
        self._socket = socket.create_connection(("127.0.0.1", port), 30)
        key = blake3_keyed(secret, b"mooncache tenant v1\0" + tenant.encode())
        nonce = os.urandom(16)
        hello = struct.pack("<HHI", 0, 0, os.getpid()) + nonce + text(tenant) + text("peer") + text("0")
        challenge = self.call(HELLO, hello)[0][:16]
        said = challenge + nonce + tenant.encode()
        answer, _ = self.call(AUTH, blake3_keyed(key, b"mooncache hello c v1" + said))
        expected = blake3_keyed(key, b"mooncache hello s v1" + nonce + challenge + tenant.encode())
        assert answer[:32] == expected, "the node did not prove itself"

    def _receive(self, size: int) -> bytes:
        data = b""
        while len(data) < size:
            part = self._socket.recv(size - len(data))
            if not part:
                raise EOFError("the node closed the connection")
            data += part
        return data

    def call(self, opcode: int, meta: bytes, payload: bytes = b"", flags: int = 0) -> tuple[bytes, bytes]:
        """Body and payload of the answer; AssertionError when the node says no."""
        head = HEADER.pack(MAGIC, VERSION, opcode, flags, 1, len(payload), len(meta), 0)[:28]
        self._socket.sendall(head + struct.pack("<I", crc32c(meta, crc32c(head))) + meta + payload)
        fields = HEADER.unpack(self._receive(HEADER.size))
        answer = self._receive(fields[6])
        code, size = struct.unpack_from("<HH", answer)
        assert code == 0, f"opcode {opcode} was answered {code}: {answer[4 : 4 + size].decode()}"
        return answer[4 + size :], self._receive(fields[5])

    def close(self) -> None:
        self._socket.close()
