"""A real node behind a path that is slow or stops: what had come of a load is used, and no late byte comes after it."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

import mooncache
from mooncache.bench.throttle import ThrottledPath
from mooncache.cluster.embedded import ClusterSettings, EmbeddedCluster
from mooncache.kvcache import mover as mv
from mooncache.kvcache.core.break_even import Pace
from mooncache.kvcache.lookup import LookupOutcome, LookupRequest, Lookups
from mooncache.kvcache.memory import HostMemory, LayerLayout, Region
from mooncache.kvcache.pool_link import PoolLink
from tests.conditions import wait_until
from tests.kvcache.conftest import WAIT_S
from tests.kvcache.test_mover import wait_for

NEAR, FAR = "127.0.0.1", "127.0.0.2"
COUNT, BLOCK = 16, 256 << 10
STOP_S = 3600.0
FREED = 0xEE


class Lab:
    """A pool of one node, reached over the path by a mover with memory for two sets of blocks."""

    def __init__(self, folder: Path) -> None:
        import ctypes

        with socket.socket() as probe:
            probe.bind((FAR, 0))
            port = probe.getsockname()[1]
        env = (
            ("MOONCACHE_STORE_NODE_ADVERTISE_HOST", FAR),
            ("MOONCACHE_STORE_NODE_DATA_PORT", str(port)),
        )
        self.path = ThrottledPath(FAR, NEAR, port)
        self.path.__enter__()
        self.cluster = EmbeddedCluster(
            ClusterSettings(state_dir=folder, nodes=1, capacity_bytes=64 << 20, port=0, extra_env=env)
        )
        self.cluster.start()
        self.link = PoolLink(lambda: mooncache.connect(**self.cluster.client_settings(), shm=False))
        assert self.link.connected.wait(WAIT_S)
        self.bytes = bytearray(2 * COUNT * BLOCK)
        region = Region(ctypes.addressof(ctypes.c_char.from_buffer(self.bytes)), len(self.bytes), self.bytes)
        memory = HostMemory([(LayerLayout((2 * COUNT, BLOCK), (BLOCK, 1), 1), region)], 2 * COUNT)
        self.mover = mv.Mover(
            self.link, memory, load_timeout_s=WAIT_S, save_timeout_s=WAIT_S, save_queue_bytes_max=1 << 30
        )

    def block(self, number: int) -> memoryview:
        return memoryview(self.bytes)[number * BLOCK : (number + 1) * BLOCK]

    def saved(self) -> tuple[list[bytes], list[bytes]]:
        """New blocks in the pool: their keys and bytes."""
        keys = [os.urandom(32) for _ in range(COUNT)]
        for number in range(COUNT):
            self.block(number)[:] = os.urandom(BLOCK)
        values = [bytes(self.block(number)) for number in range(COUNT)]
        self.mover.save(mv.TransferJob("s", tuple(keys), tuple(range(COUNT))))
        assert len(wait_for(self.mover, self.mover.take_saves).stored) == COUNT
        self.bytes[:] = bytes(len(self.bytes))
        return keys, values

    def load(self, keys: list[bytes], first: int = 0, pace: Pace | None = None) -> mv.LoadReport:
        places = tuple(range(first, first + len(keys)))
        self.mover.load(mv.TransferJob("l", tuple(keys), places, pace=pace))
        report: mv.LoadReport = wait_for(self.mover, self.mover.take_loads)
        return report

    def close(self) -> None:
        self.path.stopped_until_s, self.path.rate_bytes_s = 0.0, None
        self.mover.close()
        self.link.close()
        self.cluster.stop()
        self.path.__exit__()


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    made = Lab(tmp_path_factory.mktemp("slow"))
    yield made
    made.close()


def check_nothing_comes_late(lab: Lab, keys: list[bytes], values: list[bytes], report: mv.LoadReport) -> None:
    """The blocks that did not come are given to somebody else, the path is fast again, and whatever was under way
    arrives: not there."""
    assert report.reason == mv.MoveFailure.TOO_SLOW
    assert [bytes(lab.block(at)) for at in range(report.loaded)] == values[: report.loaded]
    for at in range(report.loaded, COUNT):
        lab.block(at)[:] = bytes([FREED]) * BLOCK
    lab.path.stopped_until_s, lab.path.rate_bytes_s = 0.0, None
    wait_until(lambda: lab.load(keys, COUNT).loaded == COUNT, "the path is used again")
    assert [bytes(lab.block(COUNT + at)) for at in range(COUNT)] == values
    for at in range(report.loaded, COUNT):
        assert bytes(lab.block(at)) == bytes([FREED]) * BLOCK, f"a late byte in block {at}"


def test_a_load_that_stops_in_mid_way_is_cut(lab: Lab) -> None:
    keys, values = lab.saved()
    lab.path.stop_after(COUNT * BLOCK // 2, STOP_S)
    report = lab.load(keys, pace=Pace(1.0, 0.05))
    assert report.loaded <= COUNT // 2
    check_nothing_comes_late(lab, keys, values, report)


def test_a_load_on_a_slow_path_is_cut(lab: Lab) -> None:
    keys, values = lab.saved()
    lab.path.rate_bytes_s = 0.1 * BLOCK / 0.05
    report = lab.load(keys, pace=Pace(0.2, 0.05))
    assert report.loaded < COUNT
    check_nothing_comes_late(lab, keys, values, report)


def test_a_load_that_is_cancelled_while_it_stands_still_ends_by_its_pace(lab: Lab) -> None:
    keys, values = lab.saved()
    lab.path.stop_after(COUNT * BLOCK // 2, STOP_S)
    pace = Pace(1.0, 0.05)
    lab.mover.load(mv.TransferJob("l", tuple(keys), tuple(range(COUNT)), pace=pace))
    wait_until(lambda: lab.path.stopped_until_s > time.monotonic(), "it stands still")
    lab.mover.cancel("l")
    report = wait_for(lab.mover, lab.mover.take_loads)
    assert report.reason in {mv.MoveFailure.TOO_SLOW, mv.MoveFailure.CANCELLED}
    report.reason = mv.MoveFailure.TOO_SLOW
    check_nothing_comes_late(lab, keys, values, report)


def test_a_question_on_a_path_that_stands_still_ends_at_its_limit(lab: Lab) -> None:
    keys, _ = lab.saved()
    lookups = Lookups(lab.link)
    lab.path.stopped_until_s = time.monotonic() + STOP_S
    try:
        lookups.ask(LookupRequest("r", b"".join(keys), limit_s=0.05))
        answer = wait_until(lambda: lookups.take("r"), "an answer", every_s=0.002)
        assert (answer.outcome, answer.present) == (LookupOutcome.LATE, ())
        lab.path.stopped_until_s = 0.0

        def there() -> bool:
            lookups.ask(LookupRequest("again", b"".join(keys)))
            found = wait_until(lambda: lookups.take("again"), "an answer", every_s=0.002)
            return bool(found.present) and all(found.present)

        wait_until(there, "the path is used again")
    finally:
        lab.path.stopped_until_s = 0.0
        lookups.close()
