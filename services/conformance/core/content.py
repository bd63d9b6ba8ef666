"""Bytes that follow from their key and version, so that whoever reads them can check them alone."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable


def content_of(key: bytes, size_bytes: int, version: int = 0) -> bytes:
    """The bytes of a version of a key. No two versions and no two keys have equal bytes, from 8 bytes on."""
    seed = b"%d %d " % (version, size_bytes) + key
    return hashlib.shake_128(seed).digest(size_bytes)


def difference(found: bytes | bytearray | memoryview, right: bytes) -> str:
    """How found bytes differ from the right ones, for people; "" when they do not."""
    if found == right:
        return ""
    if len(found) != len(right):
        return f"{len(found)} bytes where {len(right)} are right"
    at = next(place for place, (one, other) in enumerate(zip(found, right, strict=True)) if one != other)
    wrong = sum(one != other for one, other in zip(found, right, strict=True))
    return f"{wrong} of {len(right)} bytes are wrong, the first at {at}"


def version_of(found: bytes, key: bytes, size_bytes: int, versions: Iterable[int]) -> int | None:
    """The version whose bytes these are as a whole; None for a mix or foreign bytes."""
    for version in versions:
        if found == content_of(key, size_bytes, version):
            return version
    return None


def neighbours(key: bytes, allowed: bytes) -> list[bytes]:
    """For each place of a key, the key with another byte there, out of `allowed`."""
    found = []
    for place, byte in enumerate(key):
        other = allowed[(allowed.find(byte) + 1) % len(allowed)]
        found.append(key[:place] + bytes([other]) + key[place + 1 :])
    return found


def odd_keys(head: bytes) -> list[bytes]:
    """Keys that stores confuse: ends, zeros, separators, case, encodings, lengths at powers of two."""
    long: list[bytes] = []
    for size in (255, 256, 257, 4096, 65_535, 65_536, 65_537, 1 << 20):
        long += [head + b"k" * (size - len(head) - 1) + end for end in (b"1", b"2")]
    plain = (
        b"a",
        b"a\0",
        b"a\0b",
        b"a\0c",
        b"\0a",
        b"a ",
        b" a",
        b"A",
        b"a/b",
        b"a//b",
        b"a/../a",
        b"a.",
        b"a%00",
    )
    coded = (
        "\u00e9".encode(),
        "e\u0301".encode(),
        b"\xff\xfe",
        b"\xff\xff",
        b"\xc0\x80",
        "\U0001f511".encode(),
    )
    return [b"", b"\0", b"\0\0", head, *(head + end for end in (*plain, *coded)), *long]
