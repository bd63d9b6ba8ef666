"""Saving layer by layer: one call for a layer of all blocks of a step, and nothing that fails is taken for stored."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest

from mooncache.client.results import BatchResult, PutResult
from mooncache.errors import AlreadyExists, DeadlineExceeded, NoSpace
from mooncache.kvcache import mover as mv
from mooncache.kvcache.layerwise import LayerSaver
from mooncache.kvcache.pool_link import Breaker, PoolLink
from tests.kvcache.conftest import BLOCK_BYTES, BLOCKS, WAIT_S, Engine
from tests.kvcache.faulty import FaultyPool
from tests.kvcache.test_mover import job, key, make, wait_for


def test_layers_are_written_as_they_come_and_seen_at_the_commit(real_link: PoolLink) -> None:
    engine, other = Engine(), Engine()
    reports: list[mv.SaveReport] = []
    ended = threading.Event()

    def report(save: mv.SaveReport) -> None:
        reports.append(save)
        ended.set()

    saver = LayerSaver(
        real_link, engine.memory, ["a", "b", "c"], report, timeout_s=5.0, queue_bytes_max=1 << 20
    )
    keys = [os.urandom(32) for _ in range(3)]
    for block in range(3):
        engine.fill(block, 20 * block)
    order = job("s", keys, [0, 1, 2])
    saver.layer_done([order], "a")
    saver.layer_done([order], "unknown")
    saver.layer_done([order], "b")  # the hook of "c" does not fire
    client = real_link.client()
    assert client is not None
    assert client.exists_many(keys) == (False, False, False)
    saver.finish(order)
    assert ended.wait(WAIT_S)
    assert (reports[0].stored, reports[0].saved_bytes, reports[0].lost) == ((0, 1, 2), 3 * BLOCK_BYTES, {})
    mover = make(real_link, other)
    mover.load(job("l", keys, [7, 8, 9]))
    assert wait_for(mover, mover.take_loads).loaded == 3
    assert [other.block(7 + i) for i in range(3)] == [engine.block(i) for i in range(3)]

    ended.clear()
    saver.finish(job("again", keys, [0, 1, 2]))
    assert ended.wait(WAIT_S)
    assert (reports[1].present, reports[1].saved_bytes) == (3, 0)
    assert saver.wait_saved(WAIT_S)
    saver.close()
    mover.close()


def test_layers_that_find_no_space_are_given_up(faulty: FaultyPool, faulty_link: PoolLink) -> None:
    engine = Engine()
    reports: list[mv.SaveReport] = []
    ended = threading.Event()

    def report(save: mv.SaveReport) -> None:
        reports.append(save)
        ended.set()

    saver = LayerSaver(
        faulty_link, engine.memory, ["a", "b", "c"], report, timeout_s=5.0, queue_bytes_max=BLOCK_BYTES
    )
    saver.finish(job("s", [key(0)], [0]))
    assert ended.wait(WAIT_S)
    assert reports[0].lost == {mv.MoveFailure.FULL: 1}
    saver.finish(job("large", [key(i) for i in range(BLOCKS)], list(range(BLOCKS))))
    assert reports[1].lost == {mv.MoveFailure.FULL: BLOCKS}
    saver.close()


class Reserved:
    """Reservations in a pool whose node behaves badly."""

    def __init__(self, pool: BadNode, keys: list[bytes]) -> None:
        self.pool = pool
        self.keys = keys
        self.codes = tuple(pool.codes.get(key, 0) for key in keys)

    def write_gathered(self, offset: int, source: Any, places: Any, *, timeout_s: float) -> BatchResult:
        self.pool.limits_s.append(timeout_s)
        if self.pool.write_error is not None:
            raise self.pool.write_error
        if self.pool.stopped:
            self.pool.hold.wait(timeout_s)
            raise DeadlineExceeded("no answer")
        self.pool.writes.append([key for key, at in zip(self.keys, places, strict=True) if at is not None])
        lost = self.pool.lost_at.get(offset, b"")
        return BatchResult(tuple(DeadlineExceeded.code if key == lost else 0 for key in self.keys))

    def commit(self, *, timeout_s: float) -> PutResult:
        self.pool.committed += len(self.keys)
        return PutResult((0,) * len(self.keys), (True,) * len(self.keys), ("n",) * len(self.keys))

    def abort(self) -> None:
        self.pool.aborted += len(self.keys)


class BadNode(FaultyPool):
    """Reserves, and then fails at writing."""

    def __init__(self) -> None:
        super().__init__()
        self.write_error: Exception | None = None
        self.stopped = False
        self.hold = threading.Event()
        self.limits_s: list[float] = []
        self.writes: list[list[bytes]] = []
        self.preferred: list[str | None] = []
        self.lost_at: dict[int, bytes] = {}
        self.committed = self.aborted = 0

    def reserve_many(
        self, keys: Any, block_bytes: int, *, prefer_node: str | None = None, timeout_s: float | None = None
    ) -> Any:
        self._enter("reserve")
        self.preferred.append(prefer_node)
        return Reserved(self, list(keys))


@pytest.fixture
def faulty_layers() -> Iterator[Callable[..., tuple[BadNode, LayerSaver, list[mv.SaveReport]]]]:
    """Makes a saver of layers over a bad node; ended with the test."""
    ended: list[Callable[[], None]] = []

    def build(timeout_s: float) -> tuple[BadNode, LayerSaver, list[mv.SaveReport]]:
        pool, reports = BadNode(), []
        link = PoolLink(lambda: pool, breaker=Breaker(failures_max=1 << 30))
        assert link.connected.wait(WAIT_S)
        saver = LayerSaver(
            link,
            Engine().memory,
            ["a", "b", "c"],
            reports.append,
            timeout_s=timeout_s,
            queue_bytes_max=1 << 20,
        )
        ended.extend((saver.close, link.close))
        return pool, saver, reports

    yield build
    for end in ended:
        end()


def test_a_defect_while_layers_are_written_ends_no_thread_and_commits_nothing(
    faulty_layers: Callable[..., tuple[BadNode, LayerSaver, list[mv.SaveReport]]],
) -> None:
    pool, saver, reports = faulty_layers(5.0)
    pool.write_error = ZeroDivisionError()
    order = job("s", [key(0), key(1)], [0, 1])
    saver.layer_done([order], "a")
    saver.finish(order)
    assert saver.wait_saved(WAIT_S), "the blocks stay pinned forever"
    assert (pool.committed, pool.aborted) == (0, 2)
    pool.write_error = None
    saver.finish(job("later", [key(2)], [0]))
    assert saver.wait_saved(WAIT_S)
    saver.close()
    assert [(report.stored, report.lost) for report in reports] == [
        ((), {mv.MoveFailure.UNAVAILABLE: 2}),
        ((0,), {}),
    ]


def test_a_node_that_hangs_takes_its_time_once_for_all_blocks_of_a_layer(
    faulty_layers: Callable[..., tuple[BadNode, LayerSaver, list[mv.SaveReport]]],
) -> None:
    pool, saver, reports = faulty_layers(0.05)
    pool.stopped = True
    saver.finish(job("s", [key(i) for i in range(BLOCKS)], list(range(BLOCKS))))
    assert saver.wait_saved(WAIT_S)
    saver.close()
    assert reports[0].lost == {mv.MoveFailure.TIMEOUT: BLOCKS}
    assert len(pool.limits_s) < BLOCKS


def test_a_layer_of_all_blocks_of_a_step_is_one_call(
    faulty_layers: Callable[..., tuple[BadNode, LayerSaver, list[mv.SaveReport]]],
) -> None:
    pool, saver, reports = faulty_layers(5.0)
    first, second = job("first", [key(0), key(1)], [0, 1]), job("second", [key(2)], [2])
    for layer in ("a", "b", "c"):
        saver.layer_done([first, second], layer)
    saver.finish(first)
    saver.finish(second)
    assert saver.wait_saved(WAIT_S)
    saver.close()
    assert pool.calls == ["exists", "reserve"]
    assert pool.writes == [[key(0), key(1), key(2)]] * 3
    assert pool.committed == 3
    assert {report.name: report.stored for report in reports} == {"first": (0, 1), "second": (0,)}


def test_a_block_that_is_lost_in_mid_save_costs_itself_alone(
    faulty_layers: Callable[..., tuple[BadNode, LayerSaver, list[mv.SaveReport]]],
) -> None:
    pool, saver, reports = faulty_layers(5.0)
    keys = [key(i) for i in range(4)]
    pool.codes = {keys[0]: AlreadyExists.code, keys[3]: NoSpace.code}
    pool.lost_at = {BLOCK_BYTES // 3: keys[1]}  # at the second layer
    saver.finish(job("s", keys, [0, 1, 2, 3]))
    assert saver.wait_saved(WAIT_S)
    saver.close()
    assert pool.writes == [[keys[1], keys[2]], [keys[1], keys[2]], [keys[2]]]
    assert (reports[0].stored, reports[0].present, reports[0].saved_bytes) == ((0, 2), 1, BLOCK_BYTES)
    assert reports[0].lost == {mv.MoveFailure.TIMEOUT: 1, mv.MoveFailure.FULL: 1}


def test_a_save_that_is_finished_twice_ends_once(
    faulty_layers: Callable[..., tuple[BadNode, LayerSaver, list[mv.SaveReport]]],
) -> None:
    pool, saver, reports = faulty_layers(5.0)
    pool.gate = threading.Event()
    order = job("s", [key(0)], [0])
    saver.finish(order)
    saver.finish(order)
    pool.gate.set()
    assert saver.wait_saved(WAIT_S)
    saver.finish(job("later", [key(1)], [0]))
    assert saver.wait_saved(WAIT_S)
    saver.close()
    assert [report.name for report in reports] == ["s", "later"]


def test_blocks_for_one_node_are_one_call_for_each_layer(
    faulty_layers: Callable[..., tuple[BadNode, LayerSaver, list[mv.SaveReport]]],
) -> None:
    pool, saver, reports = faulty_layers(5.0)
    jobs = [
        replace(job(name, [key(number)], [number]), node=node)
        for number, (name, node) in enumerate([("a", "n1"), ("b", ""), ("c", "n1")])
    ]
    saver.finish(*jobs)
    assert saver.wait_saved(WAIT_S)
    saver.close()
    assert pool.preferred == ["n1", None]
    assert pool.writes == [[key(0), key(2)]] * 3 + [[key(1)]] * 3
    assert sorted(report.name for report in reports) == ["a", "b", "c"]
