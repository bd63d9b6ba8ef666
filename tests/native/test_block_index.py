"""The block index through Python: packing, refusals, threads. Its logic is tested against a model in C++."""

from __future__ import annotations

import struct
import threading
from collections.abc import Iterable

import numpy as np
import pytest

from mooncache import _native

ADD, REMOVE, MOVE = 1, 2, 3
TENANT = 42


def key(number: int) -> bytes:
    return _native.key_of_name(str(number))


def record(kind: int, number: int, tier: int = 1, size_bytes: int = 100, tenant: int = TENANT) -> bytes:
    return struct.pack("<BBBBIQQ32s", kind, tier, 0, 0, 0, tenant, size_bytes, key(number))


def adds(numbers: Iterable[int], **how: int) -> bytes:
    return b"".join(record(ADD, number, **how) for number in numbers)


def unpack(packed: bytes, keys: int) -> list[list[tuple[int, int, int]]]:
    out, at = [], 0
    for _ in range(keys):
        (count,) = struct.unpack_from("<H", packed, at)
        items = [struct.unpack_from("<HBBQ", packed, at + 2 + 12 * i) for i in range(count)]
        out.append([(holder, tier, size) for holder, tier, _, size in items])
        at += 2 + 12 * count
    assert at == len(packed)
    return out


def test_locate_and_match() -> None:
    index = _native.BlockIndex()
    index.apply(0, adds(range(4)))
    index.apply(7, bytearray(adds(range(2), tier=2, size_bytes=5)))
    index.apply(9, np.frombuffer(adds([1]), dtype=np.uint8))
    keys = b"".join(key(i) for i in range(5))
    located = unpack(index.locate(TENANT, keys), 5)
    assert sorted(located[0]) == [(0, 1, 100), (7, 2, 5)]
    assert sorted(holder for holder, _, _ in located[1]) == [0, 7, 9]
    assert located[4] == []
    assert [len(items) for items in unpack(index.locate(TENANT, keys, 1), 5)] == [1, 1, 1, 1, 0]
    assert index.match(TENANT, keys) == [(0, 4), (7, 2)]
    assert index.match_tiers(TENANT, keys) == [(0, 0, 4, 4, 4), (7, 0, 0, 2, 2)]
    assert index.match(TENANT + 1, keys) == []
    assert index.present(TENANT, keys) == bytes([0b01111])
    assert index.check() == ""


def test_an_audit_gives_packed_blocks() -> None:
    index = _native.BlockIndex()
    index.apply(0, adds(range(3)))
    index.apply(1, adds([0]))
    index.apply(2, adds([1], tier=0))
    *figures, packed = index.audit([(TENANT, 2)], 1, [0, 0, 1], 2, 0, 1000, 1000)
    found = list(struct.iter_unpack("<Q32sQHBB", packed))
    assert found == [(TENANT, key(0), 100, 2, 1, 1), (TENANT, key(2), 100, 1, 1, 0)]
    assert figures == [0, 1, 100, 1, 100]
    assert index.audit([], 1, [0, 0, 1], 2, 0, 1000, 1000) == (0, 0, 0, 0, 0, b"")
    with pytest.raises(TypeError):
        index.audit([], 1, [1 << 16], 1, 0, 1000, 1000)


def test_usage_and_stats() -> None:
    index = _native.BlockIndex(hash_seed=1)
    index.apply(0, adds(range(3)) + adds([1], tenant=5))
    index.apply(1, adds(range(3)))
    assert index.tenant_usage() == {5: (100, 1), TENANT: (600, 3)}
    assert index.holder_usage() == {0: (400, 4), 1: (300, 3)}
    stats = index.stats()
    assert (stats["blocks"], stats["replicas"], stats["bytes"], stats["records_applied"]) == (4, 7, 700, 7)
    assert index.memory_bytes() == stats["memory_bytes"] > 0


def test_full_report_and_drop() -> None:
    index = _native.BlockIndex()
    index.apply(3, adds(range(10)))
    index.begin_full(3)
    index.apply(3, adds(range(4)))
    assert index.end_full(3) == 6
    assert index.drop_holder(3) == 4
    assert index.stats()["blocks"] == 0
    with pytest.raises(ValueError, match="begin_full"):
        index.end_full(3)


@pytest.mark.parametrize(
    "records",
    [
        b"x",
        adds([1])[:-1],
        record(0, 1),
        record(9, 1),
        record(ADD, 1, tier=4),
        record(MOVE, 1, size_bytes=1 << 40),
    ],
)
def test_hostile_records_leave_no_trace(records: bytes) -> None:
    index = _native.BlockIndex()
    with pytest.raises(ValueError, match="record"):
        index.apply(0, adds([5]) + records)
    assert index.stats()["blocks"] == 0


def test_limits() -> None:
    index = _native.BlockIndex(blocks_max=2)
    with pytest.raises(ValueError, match="index is full"):
        index.apply(0, adds(range(3)))
    with pytest.raises(ValueError, match="holder"):
        index.apply(65535, b"")
    for call in (index.locate, index.match, index.match_tiers, index.present):
        with pytest.raises(ValueError, match="multiple of 32"):
            call(TENANT, b"x" * 31)


def test_threads_share_an_index() -> None:
    index = _native.BlockIndex()
    keys = b"".join(key(i) for i in range(64))
    blob, gone = adds(range(64)), b"".join(record(REMOVE, i) for i in range(64))
    done = threading.Event()
    wrong: list[object] = []

    def read() -> None:
        while not done.is_set():
            found = index.match(TENANT, keys)
            if any(run > 64 for _, run in found):
                wrong.append(found)

    threads = [threading.Thread(target=read) for _ in range(2)]
    for thread in threads:
        thread.start()
    for turn in range(200):
        index.apply(turn % 5, blob if turn % 3 else gone)
    done.set()
    for thread in threads:
        thread.join()
    assert not wrong
    assert index.check() == ""


def test_benchmark_reports_its_numbers() -> None:
    result = _native.index_benchmark(1000, 10, 2000)
    assert result["blocks"] == 1000
    assert all(result[name] > 0 for name in ("apply_per_s", "locate_per_s", "match_per_s", "bytes_per_block"))
    with pytest.raises(ValueError, match="at least 1"):
        _native.index_benchmark(0, 10)
