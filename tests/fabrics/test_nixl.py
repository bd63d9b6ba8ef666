"""The conformance suite of native/tests/transport/conformance_test.cpp for NIXL: between two processes, over real NIXL
where it is installed, and in one process over a fake agent, which can hang, fail and lose its peer on demand."""

from __future__ import annotations

import ctypes
import gc
import itertools
import os
import random
import subprocess
import sys
import time
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from mooncache import _native
from mooncache.bench.worker import Worker
from mooncache.errors import (
    Cancelled,
    Closed,
    ConnectionLost,
    InvalidArgument,
    PermissionDenied,
    TransportUnavailable,
)
from mooncache.fabrics import nixl
from mooncache.fabrics.contract import Completion, Extent, Transfer
from mooncache.fabrics.nixl import SLOT_BYTES, NixlLink, NixlNode, make_agent, unavailable_reason
from tests.conditions import wait_until


class FakeDisconnectError(Exception):
    """Named as NIXL names it."""


class FakeAgent:
    """Moves bytes inside this process, when it is told to."""

    def __init__(self) -> None:
        self.regions: list[tuple[int, int]] = []
        self.hold = False
        self.dead = False
        self.state = "DONE"  # of what is over
        self.refuses = ""  # the name of a call that raises
        self.handles = 0

    def register_memory(self, regions: list[tuple[int, int, int, str]], _kind: str) -> list[tuple[int, int]]:
        found = [(address, size) for address, size, _, _ in regions]
        self.regions += found
        return found

    def deregister_memory(self, regions: list[tuple[int, int]]) -> None:
        for region in regions:
            self.regions.remove(region)

    def get_agent_metadata(self) -> bytes:
        return b"fake"

    def add_remote_agent(self, metadata: bytes) -> bytes:
        if metadata != b"fake":
            raise ValueError("NIXL_ERR_MISMATCH")
        return b"peer"

    def remove_remote_agent(self, _peer: str) -> None:
        pass

    def get_xfer_descs(self, descriptors: list[tuple[int, int, int]], _kind: str) -> tuple[int, int]:
        return descriptors[0][:2]

    def initialize_xfer(self, way: str, here: tuple[int, int], there: tuple[int, int], _peer: str) -> Any:
        if self.dead:
            raise FakeDisconnectError
        for address, size in (here, there):
            if not any(base <= address and address + size <= base + room for base, room in self.regions):
                raise KeyError("NIXL_ERR_NOT_FOUND")
        self.handles += 1
        return [way, here, there, False]

    def transfer(self, _handle: Any) -> str:
        if self.refuses == "transfer":
            raise KeyError("NIXL_ERR_INVALID_PARAM")
        return "PROC"

    def check_xfer_state(self, handle: Any) -> str:
        if self.dead:
            raise FakeDisconnectError
        if self.hold:
            return "PROC"
        way, here, there, done = handle
        if not done:
            target, source = (here, there) if way == "READ" else (there, here)
            ctypes.memmove(target[0], source[0], here[1])
            handle[3] = True
        return self.state

    def release_xfer_handle(self, _handle: Any) -> None:
        self.handles -= 1
        if self.refuses == "release":
            raise FakeDisconnectError


class FakePeer:
    def __init__(self) -> None:
        self.agent = FakeAgent()
        self.node = NixlNode(self.agent)
        self.kept: list[bytearray] = []
        self.link = NixlLink(self.agent, self.node.metadata, slots=4)

    def add(self, size: int, seed: int = 0, count: int = 1) -> list[Extent]:
        for number in range(count):
            self.kept.append(bytearray(random.Random(seed + number).randbytes(size)))
        return [self.node.register(memoryview(block)) for block in self.kept[-count:]]

    def crc(self, index: int) -> int:
        return _native.crc32c(self.kept[index])

    def twice(self) -> list[bool]:
        extent = self.node.register(memoryview(self.kept[0]))
        return [self.node.unregister(extent) for _ in range(3)]

    def kill(self) -> None:
        self.agent.dead = True

    def close(self) -> None:
        self.link.release(timeout_s=0.1)
        self.node.close()


class RealPeer:
    """NIXL in two processes. The link is made again when there is new memory: metadata holds what was there then."""

    def __init__(self) -> None:
        name = f"peer{time.monotonic_ns()}"
        path = os.pathsep.join([str(Path(__file__).resolve().parents[2]), os.environ.get("PYTHONPATH", "")])
        env = {"PYTHONPATH": path, "NIXL_LOG_LEVEL": "FATAL"}
        self._worker = Worker("tests.fabrics.nixl_peer", [name], python=sys.executable, env=env)
        self._agent = make_agent(f"me{time.monotonic_ns()}")
        self._link: NixlLink | None = None
        self._metadata = b""

    @property
    def link(self) -> NixlLink:
        if self._link is None:
            self._link = NixlLink(self._agent, self._metadata, slots=4)
        return self._link

    def add(self, size: int, seed: int = 0, count: int = 1) -> list[Extent]:
        if self._link is not None:
            self._link.release()
            self._link = None
        answer = self._worker.ask("add", size=size, seed=seed, count=count)
        self._metadata = bytes.fromhex(answer["metadata"])
        return [Extent(address, size, writable=True) for address in answer["addresses"]]

    def crc(self, index: int) -> int:
        return int(self._worker.ask("crc", index=index)["crc"])

    def twice(self) -> list[bool]:
        return list(self._worker.ask("twice")["removed"])

    def kill(self) -> None:
        self._worker._process.kill()
        self._worker._process.wait()

    def close(self) -> None:
        if self._link is not None:
            self._link.release()
        self._worker.close()


@pytest.fixture(params=["fake", "nixl"])
def peer(request: pytest.FixtureRequest) -> Iterator[FakePeer | RealPeer]:
    if request.param == "nixl" and (reason := unavailable_reason()):
        pytest.skip(reason)
    made = FakePeer() if request.param == "fake" else RealPeer()
    yield made
    made.close()


def drain(link: NixlLink, count: int) -> list[Completion]:
    found: list[Completion] = []
    wait_until(
        lambda: found.extend(link.poll(time.monotonic() + 1.0)) or len(found) >= count, "all completions"
    )
    return found


def test_scatter_gather_in_order_with_crc(peer: Any) -> None:
    size = 3_000_001
    (extent,) = peer.add(size, seed=1)
    source = random.Random(1).randbytes(size)
    copy = bytearray(size)
    view = memoryview(copy)
    cuts = [0, 1, 1, 70_000, 2_500_000, size]
    transfers = []
    for number, (begin, end) in enumerate(itertools.pairwise(cuts)):
        middle = begin + (end - begin) // 3
        local = [view[begin:middle], view[0:0], view[middle:end]]
        transfers.append(Transfer(number + 10, False, extent, local, begin))
    assert peer.link.submit(transfers) == len(transfers)
    done = drain(peer.link, len(transfers))
    assert done == [
        Completion(number + 10, 0, end - begin, _native.crc32c(source[begin:end]))
        for number, (begin, end) in enumerate(itertools.pairwise(cuts))
    ]
    assert copy == source


def test_writes_arrive(peer: Any) -> None:
    size = 2 * SLOT_BYTES + 17
    (extent,) = peer.add(size)
    source = bytearray(random.Random(9).randbytes(size))
    view = memoryview(source)
    peer.link.submit([Transfer(1, True, extent, [view[:100], view[100:]])])
    assert drain(peer.link, 1) == [Completion(1, 0, size, _native.crc32c(source))]
    assert peer.crc(0) == _native.crc32c(source)


def test_a_thousand_regions(peer: Any) -> None:
    extents = peer.add(512, seed=100, count=1000)
    targets = [bytearray(512) for _ in extents]
    transfers = [
        Transfer(number, False, extent, [memoryview(target)])
        for number, (extent, target) in enumerate(zip(extents, targets, strict=True))
    ]
    assert peer.link.submit(transfers) == 1000
    assert [item.code for item in drain(peer.link, 1000)] == [0] * 1000
    assert all(target == random.Random(100 + number).randbytes(512) for number, target in enumerate(targets))


def test_hostile_extents_are_errors_and_others_go_on(peer: Any) -> None:
    (good,) = peer.add(5000, seed=1)
    copy = bytearray(b"\x09" * 5000)
    hostile = [
        Extent(good.address + (1 << 40), 5000, writable=True),  # nobody registered that
        Extent(good.address, 10, writable=True),  # smaller than what is asked for
        Extent((1 << 64) - 6000, 5000, writable=True),
        Extent(good.address + 4000, 5000, writable=True),  # sticks out
    ]
    transfers = [Transfer(number, False, extent, [memoryview(copy)]) for number, extent in enumerate(hostile)]
    transfers.append(Transfer(7, True, Extent(good.address, 5000, writable=False), [memoryview(copy)]))
    transfers.append(Transfer(8, False, good, [memoryview(copy)], 1))
    assert peer.link.submit(transfers) == 6
    done = drain(peer.link, 6)
    assert [item.code for item in done[:4]] == [InvalidArgument.code] * 4
    assert [item.code for item in done[4:]] == [PermissionDenied.code, InvalidArgument.code]
    assert copy == b"\x09" * 5000
    peer.link.submit([Transfer(50, False, good, [memoryview(copy)])])
    assert drain(peer.link, 1)[0].code == 0
    assert copy == random.Random(1).randbytes(5000)


def test_zero_length_completes(peer: Any) -> None:
    (extent,) = peer.add(10)
    peer.link.submit([Transfer(5, False, extent, [], 10)])
    assert drain(peer.link, 1) == [Completion(5, 0, 0, 0)]


def test_after_cancel_no_byte_moves(peer: Any) -> None:
    (extent,) = peer.add(16 << 20)
    copy = bytearray(16 << 20)
    peer.link.submit([Transfer(1, False, extent, [memoryview(copy)])])
    peer.link.poll(time.monotonic())
    assert peer.link.cancel(1)
    copy[:] = b"\xee" * len(copy)
    assert drain(peer.link, 1) == [Completion(1, Cancelled.code, 0, 0)]
    time.sleep(0.02)
    peer.link.poll(time.monotonic())
    assert copy == b"\xee" * len(copy)
    assert not peer.link.cancel(1)
    peer.link.submit([Transfer(2, False, extent, [memoryview(copy)[: 8 << 20]])])
    assert drain(peer.link, 1)[0].code == 0  # the slots came back


def test_close_with_work_in_flight(peer: Any) -> None:
    (extent,) = peer.add(8 << 20)
    copy = bytearray(8 << 20)
    peer.link.submit([Transfer(number, False, extent, [memoryview(copy)]) for number in range(3)])
    link = peer.link
    link.poll(time.monotonic())
    link.close()
    assert [item.code for item in drain(link, 3)] == [Closed.code] * 3
    assert not link.healthy


def test_peer_death_ends_transfers(peer: Any) -> None:
    (extent,) = peer.add(1 << 20)
    copy = bytearray(1 << 20)
    link = peer.link
    link.submit([Transfer(1, False, extent, [memoryview(copy)])])
    assert drain(link, 1)[0].code == 0
    peer.kill()
    link.submit([Transfer(2, False, extent, [memoryview(copy)])])
    assert [item.code for item in drain(link, 1)] == [ConnectionLost.code]
    assert not link.healthy


def test_queue_is_bounded_and_poll_keeps_its_deadline(peer: Any) -> None:
    (extent,) = peer.add(10)
    many = [Transfer(number, False, extent, []) for number in range(5000)]
    taken = peer.link.submit(many)
    assert 0 < taken < 5000
    assert peer.link.submit(many) == 0
    assert len(drain(peer.link, taken)) == taken
    begun = time.monotonic()
    assert peer.link.poll(begun + 0.01) == []
    assert time.monotonic() - begun < 10


def test_memory_that_is_registered_twice_is_gone_when_it_was_unregistered_twice(peer: Any) -> None:
    peer.add(4096)
    assert peer.twice() == [True, True, False]


def test_a_transfer_that_hangs_keeps_its_slots_and_nothing_else() -> None:
    peer = FakePeer()
    (extent,) = peer.add(4 * SLOT_BYTES, seed=3)
    copy = bytearray(4 * SLOT_BYTES)
    peer.agent.hold = True
    peer.link.submit([Transfer(1, False, extent, [memoryview(copy)])])
    assert peer.link.poll(time.monotonic() + 0.01) == []
    assert peer.link.cancel(1)
    assert drain(peer.link, 1)[0].code == Cancelled.code
    peer.link.submit([Transfer(2, False, extent, [memoryview(copy)])])
    assert peer.link.poll(time.monotonic() + 0.01) == []  # all slots are with the first one
    peer.agent.hold = False
    assert drain(peer.link, 1)[0].code == 0
    assert copy == random.Random(3).randbytes(len(copy))
    assert peer.agent.handles == 0
    peer.close()
    assert peer.agent.regions == []


def test_an_error_state_is_a_lost_connection() -> None:
    peer = FakePeer()
    (extent,) = peer.add(4096)
    peer.agent.state = "ERR"
    peer.link.submit([Transfer(1, False, extent, [memoryview(bytearray(4096))])])
    assert [item.code for item in drain(peer.link, 1)] == [ConnectionLost.code]
    assert not peer.link.healthy
    peer.close()


def test_a_closed_link_takes_nothing_on() -> None:
    peer = FakePeer()
    (extent,) = peer.add(4096)
    peer.link.close()
    peer.link.submit([Transfer(1, False, extent, [memoryview(bytearray(4096))])])
    assert [item.code for item in drain(peer.link, 1)] == [Closed.code]
    peer.close()


@pytest.mark.parametrize(("call", "code"), [("transfer", InvalidArgument.code), ("release", 0)])
def test_calls_that_fail_leave_no_handle_and_no_slot_behind(call: str, code: int) -> None:
    peer = FakePeer()
    (extent,) = peer.add(8 * SLOT_BYTES, seed=3)
    copy = bytearray(8 * SLOT_BYTES)
    for _ in range(3):
        peer.agent.refuses = call
        peer.link.submit([Transfer(1, False, extent, [memoryview(copy)])])
        assert [item.code for item in drain(peer.link, 1)] == [code]
    assert peer.agent.handles == 0
    peer.agent.refuses = ""
    peer.link.submit([Transfer(2, False, extent, [memoryview(copy)])])
    assert [item.code for item in drain(peer.link, 1)] == [0]
    peer.close()


def test_slots_that_never_come_back_outlive_their_link() -> None:
    peer = FakePeer()
    (extent,) = peer.add(4096, seed=3)
    peer.agent.hold = True
    peer.link.submit([Transfer(1, False, extent, [memoryview(bytearray(4096))])])
    peer.link.poll(time.monotonic())
    slots = weakref.ref(peer.link._memory)
    peer.link.release(timeout_s=0.01)
    del peer.link
    gc.collect()
    assert slots() is not None, "a device that writes late writes into memory that is gone"


def test_what_is_missing_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(TransportUnavailable, match="metadata"):
        NixlLink(FakeAgent(), b"nonsense")
    monkeypatch.setitem(sys.modules, "nixl._api", None)
    assert (nixl.unavailable_reason() or "").startswith("NIXL unavailable, because")
    with pytest.raises(TransportUnavailable, match="because"):
        make_agent("x")


def test_the_infiniband_module_is_left_out_where_there_is_no_device(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(nixl, "_RDMA_DEVICES", tmp_path)
    monkeypatch.setitem(os.environ, "UCX_MODULES", "^cuda")
    unavailable_reason()
    assert os.environ["UCX_MODULES"] == "^cuda", "somebody chose that"
    monkeypatch.delitem(os.environ, "UCX_MODULES")
    (tmp_path / "mlx5_0").mkdir()
    unavailable_reason()
    assert "UCX_MODULES" not in os.environ
    (tmp_path / "mlx5_0").rmdir()
    unavailable_reason()
    assert os.environ["UCX_MODULES"] == "^ib"


@pytest.mark.skipif(any(nixl._RDMA_DEVICES.glob("*")), reason="UCX's InfiniBand module is needed here")
def test_a_process_that_had_an_agent_ends_well() -> None:
    if reason := unavailable_reason():
        pytest.skip(reason)
    code = "from mooncache.fabrics.nixl import make_agent; make_agent('short')"
    env = {name: value for name, value in os.environ.items() if name != "UCX_MODULES"}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, check=False)
    assert done.returncode == 0, done.stderr.decode(errors="replace")
