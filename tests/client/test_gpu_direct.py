"""Registered GPU memory moved in place: over the fake CUDA driver, whose memory the processor cannot read, and the
fake libibverbs of the native tests. What cannot go in place is staged, within the same call."""

from __future__ import annotations

import ctypes
import gc
import mmap
import os
import random
import time
import weakref
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import mooncache
from mooncache import _native
from mooncache.client import gpu_direct, staging
from mooncache.client.device import DeviceView
from mooncache.config.pool import RdmaSection
from mooncache.errors import BackPressure, ChecksumMismatch, DeadlineExceeded, InvalidArgument
from tests.gpu.fake_gpu import FakeGpu

ROOT = Path(__file__).resolve().parents[2]
BUILD = Path(os.environ.get("MOONCACHE_TEST_NATIVE_BUILD", ROOT / "build" / "release"))
FAKE = BUILD / "libfake_ibverbs.so"
DMA_BUF = 1000  # what the fake driver hands out
ARENA_BYTES = 8 << 20
BLOCK_BYTES = 700_001

pytestmark = pytest.mark.skipif(not FAKE.exists(), reason=f"{FAKE} is not built (make native-test)")


class Range:
    """A part of an arena as cupy and torch show it."""

    def __init__(self, address: int, size: int) -> None:
        self.__cuda_array_interface__ = {
            "data": (address, False),
            "shape": (size,),
            "typestr": "|u1",
            "version": 3,
        }


class Arena:
    """GPU memory that the test can look at, as an array and in parts."""

    def __init__(self, gpu: FakeGpu) -> None:
        self.memory = mmap.mmap(-1, ARENA_BYTES)  # page by page, as drivers allocate
        self._at = ctypes.addressof(ctypes.c_char.from_buffer(self.memory))
        self.address = gpu.adopt(self._at, ARENA_BYTES)

    def array(self, begin: int = 0, size: int = ARENA_BYTES) -> Range:
        return Range(self.address + begin, size)

    def fill(self, begin: int, content: bytes) -> Range:
        self.memory[begin : begin + len(content)] = content
        return self.array(begin, len(content))

    def exports(self, verbs: ctypes.CDLL) -> None:
        verbs.mooncache_fake_dma_buf(DMA_BUF, ctypes.c_void_p(self._at), ctypes.c_uint64(ARENA_BYTES))


@pytest.fixture
def verbs() -> ctypes.CDLL:
    return ctypes.CDLL(str(FAKE))


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeGpu]:
    made = FakeGpu(kernel=True)
    monkeypatch.setattr(staging, "open_device", lambda _ordinal: made.device)
    yield made
    made.restore()


@pytest.fixture
def arena(gpu: FakeGpu, verbs: ctypes.CDLL) -> Arena:
    made = Arena(gpu)
    made.exports(verbs)
    return made


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    lines: list[dict[str, Any]] = []
    keep = lambda _event, **fields: lines.append(fields)  # noqa: E731
    monkeypatch.setattr(gpu_direct, "_log", SimpleNamespace(info=keep, warning=keep))
    return lines


@pytest.fixture
def client(monkeypatch: pytest.MonkeyPatch) -> Iterator[mooncache.Client]:
    native = RdmaSection.native
    monkeypatch.setattr(RdmaSection, "native", lambda self: {**native(self), "rdma_library": str(FAKE)})
    secret = os.urandom(32)
    server = _native.StoreServer(
        {
            "secret": secret,
            "node_id": "gpu-direct",
            "tcp_host": "127.0.0.1",
            "unix_path": "",
            "capacity_bytes": 64 << 20,
            "incarnation": 1,
            "rdma_library": str(FAKE),
        }
    )
    server.start()
    address = f"127.0.0.1:{server.endpoints()['tcp_port']}"
    with mooncache.connect(nodes=[address], token=f"mcc1.{secret.hex()}") as made:
        yield made
    server.stop(1.0)


def contents(count: int) -> list[bytes]:
    return [random.Random(i).randbytes(BLOCK_BYTES + i) for i in range(count)]


def keys(count: int) -> list[bytes]:
    return [os.urandom(32) for _ in range(count)]


def moved(client: mooncache.Client) -> tuple[int, int]:
    """Bytes in place, and bytes over TCP."""
    stats = client.stats()
    return stats["rdma_direct_bytes"], stats["tcp_bytes"]


def test_registered_gpu_memory_goes_in_place(
    client: mooncache.Client, arena: Arena, said: list[dict[str, Any]]
) -> None:
    values, names = contents(5), keys(5)
    with client.register_buffer(arena.array()) as registered:
        assert registered.size_bytes == ARENA_BYTES
        sources = [arena.fill(i * 800_000, value) for i, value in enumerate(values)]
        client.put_many(names, sources).raise_for_errors()
        assert moved(client)[0] == sum(map(len, values))
        assert list(client.get_many(names).values) == values
        targets = [
            [arena.array(i * 800_000, 400_000), arena.array(4_000_000 + i * 800_000, 400_000)]
            for i in range(5)
        ]
        arena.memory[:] = bytes(ARENA_BYTES)
        got = client.get_many_into(names, targets)
        assert list(got.sizes_bytes) == [len(value) for value in values]
        for i, value in enumerate(values):
            at = i * 800_000
            rest = 4_000_000 + at
            assert arena.memory[at : at + 400_000] == value[:400_000]
            assert arena.memory[rest : rest + len(value) - 400_000] == value[400_000:]
        direct, tcp = moved(client)
        assert direct == 2 * sum(map(len, values))
        assert tcp < 100_000
        stats = client.stats()
        assert (stats["put_items"], stats["get_items"], stats["miss_other"]) == (5, 10, 0)
    assert [line["how"] for line in said] == ["fake0:1 by dma-buf"]


def test_what_cannot_go_in_place_is_staged_in_the_same_call(
    client: mooncache.Client, gpu: FakeGpu, arena: Arena
) -> None:
    values, names = contents(4), keys(4)
    host = bytearray(values[3])
    with client.register_buffer(arena.array()):
        sources: list[Any] = [
            arena.fill(0, values[0]),
            gpu.array(values[1]),  # on the device, not registered
            [arena.fill(1 << 20, values[2][:1000]), values[2][1000:]],  # in part on the host
            host,
        ]
        result = client.put_many(names, sources)
        result.raise_for_errors()
        assert moved(client)[0] == len(values[0])
        assert list(client.get_many(names).values) == values
        targets: list[Any] = [arena.array(0, 1 << 20), gpu.array(bytes(1 << 20)), bytearray(1 << 20)]
        missing = arena.array(1 << 20, 1 << 20)
        got = client.get_many_into([*names[:3], os.urandom(32)], [*targets, missing])
        assert got.hits == 3
        assert arena.memory[: len(values[0])] == values[0]
        assert targets[1].read()[: len(values[1])] == values[1]
        assert targets[2][: len(values[2])] == values[2]
        assert moved(client)[0] == 2 * len(values[0])
        small = keys(1)
        client.put(small[0], arena.fill(0, b"few bytes"))
        assert client.get(small[0]) == b"few bytes"
        part = arena.array(2 << 20, 1000)
        assert client.get_into(names[0], part, offset=500) == 1000
        assert arena.memory[2 << 20 : (2 << 20) + 1000] == values[0][500:1500]


def test_a_lost_path_and_a_wrong_byte(
    client: mooncache.Client, arena: Arena, verbs: ctypes.CDLL, said: list[dict[str, Any]]
) -> None:
    values, names = contents(3), keys(3)
    with client.register_buffer(arena.array()):
        client.put_many(names, [arena.fill(i << 20, value) for i, value in enumerate(values)])
        arena.memory[:] = bytes(ARENA_BYTES)
        verbs.mooncache_fake_flip_bits(1)
        targets = [arena.array(i << 20, 1 << 20) for i in range(3)]
        got = client.get_many_into(names, targets)
        assert sorted(got.codes) == [0, 0, ChecksumMismatch.code]
        assert client.stats()["miss_checksum"] == 1
        verbs.mooncache_fake_cut_path(0, 1)
        try:
            got = client.get_many_into(names, targets)
        finally:
            verbs.mooncache_fake_cut_path(0, 0)
        assert got.hits == 3
        for i, value in enumerate(values):
            assert arena.memory[i << 20 : (i << 20) + len(value)] == value
        assert moved(client)[1] > sum(map(len, values)), "through pinned memory, over TCP"
    assert len(said) == 1


def test_without_a_way_it_is_said_once_and_staged(
    client: mooncache.Client, arena: Arena, verbs: ctypes.CDLL, said: list[dict[str, Any]]
) -> None:
    verbs.mooncache_fake_dma_buf(DMA_BUF, None, ctypes.c_uint64(0))
    values, names = contents(3), keys(3)
    with client.register_buffer(arena.array()):
        for _ in range(3):
            client.put_many(names, [arena.fill(i << 20, value) for i, value in enumerate(values)])
        assert list(client.get_many(names).values) == values
        assert moved(client)[0] == 0
        assert client.stats()["registration_failures"] == 1
    assert len(said) == 1
    assert said[0]["how"].startswith("staged, because RDMA unavailable, because no device memory can be")


def test_a_gpu_that_hangs_ends_the_call(client: mooncache.Client, gpu: FakeGpu, arena: Arena) -> None:
    names = keys(2)
    with client.register_buffer(arena.array()):
        sources = [arena.fill(i << 20, value) for i, value in enumerate(contents(2))]
        client.put_many(names, sources).raise_for_errors()
        gpu.hang(True)
        for move in (client.put_many, client.get_many_into):
            begun_s = time.monotonic()
            with pytest.raises(DeadlineExceeded, match="not through with its work"):
                move(names, sources, timeout_s=0.1)
            assert time.monotonic() - begun_s < 5
        gpu.hang(False)
        client.get_many_into(names, sources)


def test_the_array_lives_as_long_as_its_registration(
    client: mooncache.Client, gpu: FakeGpu, arena: Arena
) -> None:
    gone: list[int] = []
    view = arena.array()
    weakref.finalize(view, gone.append, 1)
    registered = client.register_buffer(view)
    del view
    gc.collect()
    assert not gone
    with pytest.raises(InvalidArgument, match="overlaps"):
        client.register_buffer(arena.array(10, 20))
    with pytest.raises(InvalidArgument, match="at least one byte"):
        client.register_buffer(gpu.array(b""))
    registered.close()
    gc.collect()
    assert gone
    client.register_buffer(arena.array(10, 20)).close()


def test_no_time_left_for_staging_is_the_deadlines_code() -> None:
    core = SimpleNamespace(gpu_direct=lambda _gpu: "")
    direct = gpu_direct.GpuDirect(SimpleNamespace(device=lambda _ordinal: None))  # type: ignore[arg-type]
    direct._said[0] = ""
    views = [DeviceView(1, 1, 0, None), DeviceView(2, 1, 0, None)]

    def slow(_positions: Any, _blocks: Any, limit_s: float) -> list[tuple[int, int, None]]:
        time.sleep(limit_s)
        return [(0, 1, None), (404, 0, None)]

    def never(*_args: Any) -> list[Any]:
        raise BackPressure("no time was left")

    answers = direct.get(core, views, 0.02, slow, never)
    assert answers == [(0, 1, None), (DeadlineExceeded.code, 0, None)]
