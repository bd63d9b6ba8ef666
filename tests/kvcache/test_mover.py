"""Moving blocks: the bytes arrive, every job gets its report, and nothing that fails is taken for data."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from mooncache.errors import ChecksumMismatch, DeadlineExceeded, NodeUnavailable
from mooncache.kvcache import mover as mv
from mooncache.kvcache.pool_link import Breaker, Call, PoolLink
from tests.conditions import wait_until
from tests.kvcache.conftest import BLOCK_BYTES, WAIT_S, Engine
from tests.kvcache.faulty import FaultyPool


def key(number: int) -> bytes:
    return number.to_bytes(32, "big")


def job(name: str, keys: list[bytes], blocks: list[int]) -> mv.TransferJob:
    return mv.TransferJob(name, tuple(keys), tuple(blocks))


def make(link: PoolLink, engine: Engine, **changes: Any) -> mv.Mover:
    settings: dict[str, Any] = {
        "load_threads": 2,
        "save_threads": 1,
        "load_timeout_s": 5.0,
        "save_timeout_s": 5.0,
        "save_queue_bytes_max": 64 * BLOCK_BYTES,
    }
    return mv.Mover(link, engine.memory, **{**settings, **changes})


def wait_for(mover: mv.Mover, take: Callable[[], list[Any]]) -> Any:
    """The next single report."""
    (report,) = wait_until(take, "a report")
    return report


@pytest.fixture
def movers() -> Iterator[list[mv.Mover]]:
    """Movers to be closed at the end."""
    made: list[mv.Mover] = []
    yield made
    for mover in made:
        mover.close()


def test_blocks_go_to_the_pool_and_come_back_elsewhere(real_link: PoolLink, movers: list[mv.Mover]) -> None:
    first, second = Engine(), Engine(9)
    keys = [os.urandom(32) for _ in range(6)]
    for block in range(6):
        first.fill(block, 10 * block)
    saver = make(real_link, first)
    loader = make(real_link, second)
    movers += [saver, loader]
    saver.save(job("s", keys, list(range(6))))
    saved = wait_for(saver, saver.take_saves)
    assert (saved.stored, saved.present, saved.saved_bytes) == (tuple(range(6)), 0, 6 * BLOCK_BYTES)
    assert saved.lost == {}
    places = [15, 3, 8, 1, 0, 7]
    loader.load(job("l", keys, places))
    loaded = wait_for(loader, loader.take_loads)
    assert (loaded.loaded, loaded.loaded_bytes, loaded.reason) == (6, 6 * BLOCK_BYTES, "")
    for block, place in enumerate(places):
        assert second.block(place) == first.block(block)
    assert second.block(2) == bytes([9]) * BLOCK_BYTES

    saver.save(job("again", keys, list(range(6))))
    again = wait_for(saver, saver.take_saves)
    assert (again.stored, again.present, again.saved_bytes) == (tuple(range(6)), 6, 0)


def test_a_load_stops_at_the_first_block_that_is_missing(real_link: PoolLink, movers: list[mv.Mover]) -> None:
    engine = Engine()
    mover = make(real_link, engine)
    movers.append(mover)
    keys = [os.urandom(32) for _ in range(4)]
    mover.save(job("s", [keys[0], keys[1], keys[3]], [0, 1, 3]))
    wait_for(mover, mover.take_saves)
    mover.load(job("l", keys, [4, 5, 6, 7]))
    report = wait_for(mover, mover.take_loads)
    assert (report.loaded, report.reason) == (2, mv.MoveFailure.MISSING)


def test_a_block_of_another_size_is_no_block(
    faulty: FaultyPool, faulty_link: PoolLink, movers: list[mv.Mover]
) -> None:
    mover = make(faulty_link, Engine())
    movers.append(mover)
    faulty.blocks = {key(i): bytes(BLOCK_BYTES) for i in range(3)}
    faulty.sizes[key(1)] = BLOCK_BYTES - 1
    mover.load(job("l", [key(i) for i in range(3)], [0, 1, 2]))
    report = wait_for(mover, mover.take_loads)
    assert (report.loaded, report.reason) == (1, mv.MoveFailure.WRONG_SIZE)


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (DeadlineExceeded("late"), mv.MoveFailure.TIMEOUT),
        (NodeUnavailable("gone"), mv.MoveFailure.UNAVAILABLE),
        (ZeroDivisionError(), mv.MoveFailure.UNAVAILABLE),
    ],
)
def test_calls_that_fail_are_reported_and_threads_go_on(
    faulty: FaultyPool, faulty_link: PoolLink, movers: list[mv.Mover], error: Exception, reason: str
) -> None:
    mover = make(faulty_link, Engine(), load_threads=1)
    movers.append(mover)
    faulty.blocks[key(1)] = bytes(BLOCK_BYTES)
    faulty.error = error
    mover.load(job("l", [key(1)], [0]))
    report = wait_for(mover, mover.take_loads)
    assert (report.loaded, report.reason) == (0, reason)
    mover.save(job("s", [key(2)], [0]))
    assert wait_for(mover, mover.take_saves).lost == {reason: 1}
    faulty.error = None
    mover.load(job("l2", [key(1)], [0]))
    assert wait_for(mover, mover.take_loads).loaded == 1
    mover.save(job("s2", [key(2)], [0]))
    assert wait_for(mover, mover.take_saves).stored == (0,)


def test_single_keys_that_fail_have_their_reasons(
    faulty: FaultyPool, faulty_link: PoolLink, movers: list[mv.Mover]
) -> None:
    mover = make(faulty_link, Engine())
    movers.append(mover)
    faulty.codes = {key(1): ChecksumMismatch.code, key(3): 300}
    faulty.blocks = {key(0): bytes(BLOCK_BYTES), key(1): bytes(BLOCK_BYTES)}
    mover.load(job("l", [key(0), key(1)], [0, 1]))
    report = wait_for(mover, mover.take_loads)
    assert (report.loaded, report.reason) == (1, mv.MoveFailure.CHECKSUM)
    mover.save(job("s", [key(2), key(3)], [0, 1]))
    saved = wait_for(mover, mover.take_saves)
    assert (saved.stored, saved.lost) == ((0,), {mv.MoveFailure.FULL: 1})


def test_what_does_not_fit_into_the_queue_is_dropped_at_once(
    faulty: FaultyPool, faulty_link: PoolLink, movers: list[mv.Mover]
) -> None:
    mover = make(faulty_link, Engine(), save_queue_bytes_max=2 * BLOCK_BYTES)
    movers.append(mover)
    faulty.gate = threading.Event()
    mover.save(job("a", [key(1), key(2)], [0, 1]))
    assert mover.saving_bytes == 2 * BLOCK_BYTES
    mover.save(job("b", [key(3)], [2]))
    dropped = wait_for(mover, mover.take_saves)
    assert (dropped.name, dropped.stored, dropped.lost) == ("b", (), {mv.MoveFailure.FULL: 1})
    faulty.gate.set()
    assert wait_for(mover, mover.take_saves).name == "a"
    assert mover.wait_saved(WAIT_S)
    assert mover.saving_bytes == 0


def test_a_cancelled_load_that_did_not_begin_does_not_begin(
    faulty: FaultyPool, faulty_link: PoolLink, movers: list[mv.Mover]
) -> None:
    engine = Engine(7)
    mover = make(faulty_link, engine, load_threads=1)
    movers.append(mover)
    faulty.blocks = {key(i): bytes(BLOCK_BYTES) for i in range(2)}
    faulty.gate = threading.Event()
    mover.load(job("busy", [key(0)], [0]))
    assert faulty.entered.wait(WAIT_S)
    mover.load(job("queued", [key(1)], [1]))
    mover.cancel("queued")
    mover.cancel("nobody")
    faulty.gate.set()
    reports: list[mv.LoadReport] = []
    wait_until(lambda: reports.extend(mover.take_loads()) or len(reports) == 2, "both reports")
    assert {(report.name, report.loaded, report.reason) for report in reports} == {
        ("busy", 1, ""),
        ("queued", 0, mv.MoveFailure.CANCELLED),
    }
    assert engine.block(1) == bytes([7]) * BLOCK_BYTES
    assert faulty.calls.count("get") == 1


def test_a_load_is_not_reported_before_its_call_returned(
    faulty: FaultyPool, faulty_link: PoolLink, movers: list[mv.Mover]
) -> None:
    mover = make(faulty_link, Engine())
    movers.append(mover)
    faulty.blocks[key(0)] = bytes(BLOCK_BYTES)
    faulty.gate = threading.Event()
    mover.load(job("l", [key(0)], [0]))
    assert faulty.entered.wait(WAIT_S)
    mover.cancel("l")
    assert mover.take_loads() == []
    assert mover.loading == 1
    faulty.gate.set()
    assert wait_for(mover, mover.take_loads).loaded == 1
    assert mover.loading == 0


def test_without_a_pool_everything_ends_at_once() -> None:
    def refuse() -> Any:
        raise NodeUnavailable("nobody there")

    link = PoolLink(refuse, pause_first_s=60)
    mover = make(link, Engine())
    try:
        mover.load(job("l", [key(0)], [0]))
        assert wait_for(mover, mover.take_loads).reason == mv.MoveFailure.ABSENT
        mover.save(job("s", [key(0)], [0]))
        assert wait_for(mover, mover.take_saves).lost == {mv.MoveFailure.ABSENT: 1}
    finally:
        link.close()
        mover.close()


def test_closing_drops_what_waits_and_reports_it(faulty: FaultyPool, faulty_link: PoolLink) -> None:
    mover = make(faulty_link, Engine())
    faulty.gate = threading.Event()
    mover.save(job("busy", [key(0)], [0]))
    assert faulty.entered.wait(WAIT_S)
    mover.save(job("queued", [key(1)], [1]))
    closing = threading.Thread(target=mover.close, args=(WAIT_S,))
    closing.start()
    faulty.gate.set()
    closing.join(WAIT_S)
    assert not closing.is_alive()
    reports = {report.name: report.lost for report in mover.take_saves()}
    assert reports == {"busy": {}, "queued": {mv.MoveFailure.CANCELLED: 1}}


def test_the_breaker_leaves_a_sick_pool_alone_for_a_growing_pause() -> None:
    breaker = Breaker(failures_max=2, pause_first_s=1.0, pause_max_s=3.0)
    breaker.failed(0.0)
    assert breaker.allows(0.0)
    breaker.failed(0.0)
    assert not breaker.allows(0.9)
    assert breaker.allows(1.0)
    breaker.failed(1.0)
    assert not breaker.allows(2.9)
    assert breaker.allows(3.0)
    breaker.failed(3.0)
    assert not breaker.allows(5.9)
    assert breaker.allows(6.0)
    breaker.succeeded()
    breaker.failed(6.0)
    assert breaker.allows(6.0)


def test_calls_that_fail_are_told_with_their_codes(faulty: FaultyPool, movers: list[mv.Mover]) -> None:
    failures: list[tuple[Call, str]] = []
    link = PoolLink(lambda: faulty, on_failure=lambda call, code: failures.append((call, code)))
    assert link.connected.wait(WAIT_S)
    mover = make(link, Engine())
    movers.append(mover)
    faulty.error = NodeUnavailable("gone")
    mover.load(job("l", [key(1)], [0]))
    assert wait_for(mover, mover.take_loads).loaded == 0
    faulty.error = ZeroDivisionError()
    mover.save(job("s", [key(2)], [0]))
    assert wait_for(mover, mover.take_saves).stored == ()
    assert failures == [(Call.LOAD, "NODE_UNAVAILABLE"), (Call.SAVE, "DEFECT")]
    assert link.usable
    link.failed(Call.LOOKUP, DeadlineExceeded("slow"))
    assert not link.usable and link.connection is faulty, "its figures are there while it is left alone"
    link.close()
    assert link.connection is None


def test_a_link_goes_on_trying_until_the_pool_is_there(faulty: FaultyPool) -> None:
    attempts: list[int] = []

    def connect() -> Any:
        attempts.append(1)
        if len(attempts) < 3:
            raise NodeUnavailable("not yet")
        return faulty

    link = PoolLink(connect, pause_first_s=0.001)
    assert link.connected.wait(WAIT_S)
    assert link.client() is faulty
    link.close()
    assert faulty.closed
    assert link.client() is None


def test_a_save_that_is_awaited_goes_in_parts() -> None:
    small, large, limit = 64 << 10, 4 << 20, 32 << 20

    def at_once(blocks: int, block_bytes: int, *, is_awaited: bool) -> int:
        keys = tuple(key(number) for number in range(blocks))
        return mv.TransferJob("s", keys, tuple(range(blocks)), is_awaited=is_awaited).blocks_at_once(
            block_bytes, limit
        )

    assert at_once(100, small, is_awaited=False) == 512, "as much as a call may have"
    assert at_once(100, small, is_awaited=True) == 25, "four parts"
    assert at_once(20, small, is_awaited=True) == 16, "no part is smaller than 1 MiB"
    assert at_once(100, large, is_awaited=True) == 8, "and none larger than a call may be"
    assert at_once(1, 64 << 20, is_awaited=True) == at_once(1, 64 << 20, is_awaited=False) == 1
