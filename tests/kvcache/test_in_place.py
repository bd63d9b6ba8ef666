"""An engine's tensors registered with the fabric, over the fake libibverbs of the native tests: blocks go between them
and a node in place; what cannot be registered is staged, with one line that says why. On real verbs: tests/rdma."""

from __future__ import annotations

import ctypes
import errno
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

import mooncache
from mooncache import _native
from mooncache.cli import why
from mooncache.client import staging
from mooncache.config.pool import RdmaSection
from mooncache.config.serving import ConnectorSection
from mooncache.errors import DeadlineExceeded
from mooncache.kvcache import in_place
from mooncache.kvcache.engine_pool import EnginePool
from mooncache.kvcache.in_place import RegisteredMemory
from mooncache.kvcache.memory import BlockMemory, Region, staged_of, united
from mooncache.kvcache.pool_link import PoolClient
from mooncache.kvcache.transfers import TransferJob
from mooncache.runtime.logs import Event
from tests.conditions import wait_until
from tests.gpu.fake_gpu import FakeGpu
from tests.kvcache import gpu_engine
from tests.kvcache.conftest import Engine
from tests.rdma.guest import engine

ROOT = Path(__file__).resolve().parents[2]
BUILD = Path(os.environ.get("MOONCACHE_TEST_NATIVE_BUILD", ROOT / "build" / "release"))
FAKE = BUILD / "libfake_ibverbs.so"
MOVED_BYTES = engine.MOVED * engine.BLOCK_BYTES
Connect = Callable[[], mooncache.Client]
over_fabric = pytest.mark.skipif(not FAKE.exists(), reason=f"{FAKE} is not built (make native-test)")


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Event, dict[str, Any]]]:
    lines: list[tuple[Event, dict[str, Any]]] = []
    keep = lambda event, **fields: lines.append((event, fields))  # noqa: E731
    monkeypatch.setattr(in_place, "_log", SimpleNamespace(info=keep))
    return lines


@pytest.fixture
def connect(monkeypatch: pytest.MonkeyPatch) -> Iterator[Connect]:
    """Makes clients of one node, reached over the fake fabric."""
    native = RdmaSection.native
    monkeypatch.setattr(RdmaSection, "native", lambda self: {**native(self), "rdma_library": str(FAKE)})
    secret = os.urandom(32)
    server = _native.StoreServer(
        {
            "secret": secret,
            "node_id": "in-place",
            "tcp_host": "127.0.0.1",
            "unix_path": "",
            "capacity_bytes": 64 << 20,
            "rdma_library": str(FAKE),
        }
    )
    server.start()
    address = f"127.0.0.1:{server.endpoints()['tcp_port']}"
    yield lambda: mooncache.connect(nodes=[address], token=f"mcc1.{secret.hex()}")
    server.stop(1.0)


def expect_right(said: dict[str, Any]) -> None:
    """All blocks came whole, by both ways of saving, and nothing was written beside them."""
    for load in ("load a", "load b"):
        assert said[load]["right"] == engine.MOVED
        assert said[load]["others untouched"]
        assert said[load]["bytes"] == MOVED_BYTES
    assert said["save"]["stored"] == said["save by layers"]["stored"] == engine.MOVED


@over_fabric
def test_blocks_go_between_tensors_and_node_in_place(
    connect: Connect, said: list[tuple[Event, dict[str, Any]]]
) -> None:
    played = engine.play(connect)
    expect_right(played)
    assert played["registered"] == {
        "registrations": engine.LAYERS,
        "registered_bytes": engine.LAYERS * engine.TENSOR_BYTES,
    }
    assert played["moved"] == {"rdma_bytes": 4 * MOVED_BYTES, "rdma_direct_bytes": 4 * MOVED_BYTES}
    assert all(played[part]["staged"] == 0 for part in ("save", "save by layers", "load a", "load b"))
    ((event, fields),) = said
    assert event is Event.CONNECTOR_IN_PLACE and fields["buffers"] == engine.LAYERS


@over_fabric
def test_beyond_the_budget_blocks_are_staged(
    connect: Connect, said: list[tuple[Event, dict[str, Any]]]
) -> None:
    played = engine.play(connect, registered_bytes_max=engine.LAYERS * engine.TENSOR_BYTES - 1)
    expect_right(played)
    assert played["registered"] == {"registrations": 0, "registered_bytes": 0}
    assert played["moved"] == {"rdma_bytes": 4 * MOVED_BYTES, "rdma_direct_bytes": 0}
    assert all(
        played[part]["staged"] == MOVED_BYTES for part in ("save", "save by layers", "load a", "load b")
    )
    ((event, fields),) = said
    assert event is Event.CONNECTOR_STAGED and "connector.registered_bytes_max" in fields["reason"]


@over_fabric
def test_a_device_that_refuses_one_tensor_gets_none(
    connect: Connect, said: list[tuple[Event, dict[str, Any]]]
) -> None:
    client = connect()
    memory = engine.Tensors().memory
    prepare = RegisteredMemory(memory, 1 << 40)
    fake = ctypes.CDLL(str(FAKE))
    fake.mooncache_fake_fail(b"ibv_reg_mr_iova", errno.ENOMEM, 1, 3)  # after staging memory, and two tensors
    prepare(client)
    assert client.stats()["registered_buffers"] == client.stats()["registered_bytes"] == 0
    ((event, fields),) = said
    assert event is Event.CONNECTOR_STAGED and "memlock" in fields["reason"]
    prepare(client)  # as for a new connection
    assert client.stats()["registered_buffers"] == engine.LAYERS
    assert said[-1][0] is Event.CONNECTOR_IN_PLACE
    prepare.close()
    prepare.close()
    assert client.stats()["registered_buffers"] == client.stats()["registered_bytes"] == 0
    client.close()


@over_fabric
def test_blocks_of_a_gpu_go_between_its_pinned_buffers_and_the_node_in_place(
    connect: Connect, said: list[tuple[Event, dict[str, Any]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    gpu = FakeGpu(kernel=True)
    monkeypatch.setattr(staging, "open_device", lambda _ordinal: gpu.device)
    tensors = gpu_engine.Engine(gpu, times=400)
    pool = EnginePool(ConnectorSection(load_threads=1), connect, tensors.memory)
    assert pool.link.connected.wait(engine.WITHIN_S)
    client: Any = pool.link.connection
    before = client.stats()
    assert before["registered_buffers"] == 0, "no thread has moved a block yet"
    tensors.write(1, 7)
    keys, moved = (os.urandom(32),), tensors.memory.block_bytes
    pool.mover.save(TransferJob("save", keys, (1,)))
    (saved,) = wait_until(pool.mover.take_saves, "a save")
    pool.mover.load(TransferJob("load", keys, (5,)))
    (loaded,) = wait_until(pool.mover.take_loads, "a load")
    assert (saved.stored, loaded.loaded, tensors.read(5)) == ((0,), 1, gpu_engine.expected(7, 400))
    assert saved.staged_bytes == loaded.staged_bytes == moved, "they pass through pinned memory"
    after = client.stats()
    assert after["registered_buffers"] == 2, "one of the thread that saves, one of the thread that loads"
    assert after["rdma_direct_bytes"] - before["rdma_direct_bytes"] == 2 * moved
    assert {event for event, _ in said} == {Event.CONNECTOR_STAGED}
    assert {fields["reason"] for _, fields in said} == {in_place.THROUGH_REGISTERED}
    pool.close()


@over_fabric
def test_a_pinned_buffer_that_a_gpu_still_reads_is_no_longer_registered(
    connect: Connect, said: list[tuple[Event, dict[str, Any]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    gpu = FakeGpu(kernel=True)
    monkeypatch.setattr(staging, "open_device", lambda _ordinal: gpu.device)
    monkeypatch.setattr(staging, "GRACE_S", 0.02)
    memory = gpu_engine.Engine(gpu).memory
    client = connect()
    prepare = RegisteredMemory(memory, 1 << 40)
    prepare(cast("PoolClient", client))
    gpu.hang(True)
    with pytest.raises(DeadlineExceeded), memory.reading([1], None, time.monotonic() + 0.02):
        pass
    assert client.stats()["registered_buffers"] == 0
    gpu.hang(False)
    with memory.reading([1], None, time.monotonic() + engine.WITHIN_S):
        assert client.stats()["registered_buffers"] == 1
    with memory.reading([1], None, time.monotonic() + engine.WITHIN_S):
        assert client.stats()["registered_buffers"] == 1, "the same one again"
    prepare.close()
    assert client.stats()["registered_buffers"] == 0
    client.close()


def test_without_devices_nothing_stays_registered(
    real_client: mooncache.Client, said: list[tuple[Event, dict[str, Any]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    prepare = RegisteredMemory(Engine().memory, 1 << 40)
    prepare(cast("PoolClient", real_client))
    assert real_client.stats()["registered_buffers"] == 0
    ((event, fields),) = said
    assert event is Event.CONNECTOR_STAGED and fields["reason"]
    prepare.close()


def test_what_was_closed_before_the_client_came_is_not_registered(
    real_client: mooncache.Client, said: list[tuple[Event, dict[str, Any]]]
) -> None:
    prepare = RegisteredMemory(Engine().memory, 1 << 40)
    prepare.close()
    prepare(cast("PoolClient", real_client))
    assert real_client.stats()["registered_buffers"] == 0


def test_layers_in_one_allocation_are_one_buffer() -> None:
    def bounds(*regions: tuple[int, int]) -> list[tuple[int, int]]:
        made = [Region(address, size, None) for address, size in regions]
        return [(one.address, one.size_bytes) for one in united(made)]

    assert bounds((100, 50), (300, 10)) == [(100, 50), (300, 10)]
    assert bounds((120, 30), (100, 50)) == [(100, 50)]
    assert bounds((100, 50), (149, 51), (199, 1)) == [(100, 100)]
    assert bounds((100, 50), (150, 50)) == [(100, 50), (150, 50)], "beside each other: two allocations"


@pytest.mark.parametrize(
    ("loaded", "staged", "words"),
    [
        (0, 0, ""),
        (1 << 20, 0, " in place"),
        (1 << 20, 1 << 20, " staged"),
        (1 << 20, 1 << 18, " (25% staged, the rest in place)"),
    ],
)
def test_why_says_how_the_bytes_came(loaded: int, staged: int, words: str) -> None:
    cache = {"outcome": "hit", "local_tokens": 0, "loaded_tokens": 32, "load_ms": 1.5, "waited_ms": 0.0}
    leg = {"cache": cache | {"loaded_bytes": loaded, "staged_bytes": staged}}
    assert why._cache(leg, "ended_ms") == f" (hit: 0 own, 32 loaded in 1.5 ms{words}, waited 0.0 ms)"


def test_memory_that_stages_by_itself_says_so_of_all_that_moved() -> None:
    host = Engine().memory
    moved = 3 * host.block_bytes
    assert staged_of(host, 0, moved) == 0
    assert staged_of(host, host.block_bytes, moved) == host.block_bytes
    assert staged_of(host, 10 * host.block_bytes, moved) == moved, "also of blocks that did not count"
    staging = cast("BlockMemory", SimpleNamespace(is_staged=True, block_bytes=host.block_bytes))
    assert staged_of(staging, 0, moved) == moved
