"""The native hashes through Python, against independent implementations."""

from __future__ import annotations

import hashlib
import random
import struct
from array import array

import blake3
import numpy as np
import pytest

from mooncache import _native

LENGTHS = (0, 1, 2, 3, 31, 32, 63, 64, 65, 96, 127, 128, 129, 192, 1023, 1024, 1025, 2047, 2048, 2049, 3072, 3073,
           4096, 4097, 5120, 6145, 8192, 8193, 16384, 31744, 65536, 102400)  # fmt: skip
KEY = b"whats the Elvish word for friend"


def pattern(size: int) -> bytes:
    return bytes(i % 251 for i in range(size))


@pytest.mark.parametrize("size", LENGTHS)
def test_blake3_agrees_with_another_implementation(size: int) -> None:
    data = pattern(size)
    context = "mooncache test context"
    assert _native.blake3(data) == blake3.blake3(data).digest()
    assert _native.blake3_keyed(KEY, data) == blake3.blake3(data, key=KEY).digest()
    assert (
        _native.blake3_derive_key(context, data) == blake3.blake3(data, derive_key_context=context).digest()
    )


def test_blake3_of_random_lengths() -> None:
    rng = random.Random(1)
    for _ in range(300):
        data = rng.randbytes(rng.randrange(5000))
        assert _native.blake3(data) == blake3.blake3(data).digest()


def test_long_contexts() -> None:
    for size in (0, 1024, 1025, 5000):
        context = "c" * size
        expected = blake3.blake3(b"x", derive_key_context=context).digest()
        assert _native.blake3_derive_key(context, b"x") == expected


def slow_crc32c(data: bytes) -> int:
    crc = 0xFFFFFFFF
    for byte in data:
        crc ^= byte
        for _ in range(8):
            crc = (crc >> 1) ^ (0x82F63B78 if crc & 1 else 0)
    return crc ^ 0xFFFFFFFF


def test_crc32c_against_the_definition() -> None:
    assert _native.crc32c(b"123456789") == 0xE3069283
    rng = random.Random(2)
    for size in (0, 1, 7, 8, 9, 255, 256, 511, 512, 513, 3000):
        data = rng.randbytes(size)
        cut = rng.randrange(size + 1)
        direct = slow_crc32c(data)
        assert _native.crc32c(data) == direct
        first, second = _native.crc32c(data[:cut]), _native.crc32c(data[cut:])
        assert _native.crc32c(data[cut:], first) == direct
        assert _native.crc32c_combine(first, second, size - cut) == direct


def test_any_contiguous_buffer_is_taken() -> None:
    data = pattern(4096)
    expected = _native.crc32c(data)
    for same in (bytearray(data), memoryview(data), np.frombuffer(data, dtype=np.float32), array("Q", data)):
        assert _native.crc32c(same) == expected
        assert _native.blake3(same) == _native.blake3(data)
    assert _native.crc32c(memoryview(data)[10:20]) == _native.crc32c(data[10:20])
    with pytest.raises((BufferError, ValueError)):
        _native.crc32c(np.zeros((4, 4))[:, 1])
    with pytest.raises(TypeError):
        _native.crc32c("text")


def test_wrong_lengths_are_refused_with_a_sentence() -> None:
    with pytest.raises(ValueError, match="key must be 32 bytes"):
        _native.blake3_keyed(b"short", b"")
    with pytest.raises(ValueError, match="root must be 32 bytes"):
        _native.chain_keys(b"", array("I", [1]), 1)
    with pytest.raises(ValueError, match="parent must be 32 bytes"):
        _native.chain_keys(bytes(32), array("I", [1]), 1, b"x")
    with pytest.raises(ValueError, match="block_tokens must be from 1"):
        _native.chain_keys(bytes(32), array("I", [1]), 0)


def test_chain_keys_follow_their_definition() -> None:
    root = hashlib.sha256(b"root").digest()
    tokens = [i * 7919 for i in range(100)]
    expected, parent = b"", bytes(32)
    for at in range(0, 96, 16):
        block = struct.pack("<16I", *tokens[at : at + 16])
        parent = blake3.blake3(parent + block, key=root).digest()
        expected += parent
    for dtype in (np.uint32, np.int32, np.int64, np.uint64):
        assert _native.chain_keys(root, np.array(tokens, dtype=dtype), 16) == expected
    assert _native.chain_keys(root, array("I", tokens), 16) == expected
    continued = _native.chain_keys(root, array("I", tokens[32:]), 16, expected[32:64])
    assert continued == expected[64:]


@pytest.mark.parametrize("bad", [np.array([-1]), np.array([1 << 32]), np.array([-5], dtype=np.int32)])
def test_token_ids_must_fit(bad: np.ndarray) -> None:
    with pytest.raises(ValueError, match="token id"):
        _native.chain_keys(bytes(32), bad, 1)


@pytest.mark.parametrize("bad", [np.zeros(4, np.float32), np.zeros(4, np.int16), b"1234", np.zeros(2, ">u4")])
def test_token_arrays_must_be_of_integers(bad: object) -> None:
    with pytest.raises(ValueError, match="32- or 64-bit integers"):
        _native.chain_keys(bytes(32), bad, 1)


def test_tenant_numbers() -> None:
    assert _native.tenant_id_of("default") == int.from_bytes(blake3.blake3(b"default").digest()[:8], "little")


def test_memory_benchmark_measures_something() -> None:
    result = _native.memory_benchmark(4096, 4, 3)
    assert set(result) == {
        f"{name}_bytes_per_s" for name in ("memcpy", "crc32c", "memcpy_then_crc32c", "copy_crc32c")
    }
    assert all(rate > 0 for rate in result.values())
    assert _native.crc32c_implementation() in {"portable", "sse42", "avx512", "armv8"}
    for bad in ((0, 1, 1), (1, 0, 1), (1, 1, 0), (1 << 40, 1 << 40, 1), (1, 1, 1001)):
        with pytest.raises(ValueError, match=r"at (least|most)"):
            _native.memory_benchmark(*bad)
