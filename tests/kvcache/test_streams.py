"""Streamed loads: what has come is loaded while the rest is awaited, and every load ends without a late byte."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from mooncache.client.results import WatchState
from mooncache.errors import ChecksumMismatch, NodeUnavailable
from mooncache.kvcache import mover as mv
from mooncache.kvcache import streams
from mooncache.kvcache.core.awaited import KEYS_MAX, AwaitedBlocks, NextStep
from mooncache.kvcache.pool_link import PoolLink
from tests.conditions import wait_until
from tests.kvcache.conftest import BLOCK_BYTES, WAIT_S, Engine
from tests.kvcache.faulty import FaultyPool
from tests.kvcache.test_mover import job, key, make, wait_for


@pytest.fixture
def movers() -> Iterator[list[mv.Mover]]:
    """Movers to be closed at the end."""
    made: list[mv.Mover] = []
    yield made
    for mover in made:
        mover.close()


def bytes_of(number: int) -> bytes:
    return bytes([number + 1]) * BLOCK_BYTES


def streamed(
    count: int, *, name: str = "l", first: int = 0, await_s: float = WAIT_S, **more: Any
) -> mv.TransferJob:
    """A load of blocks 0 to `count`, of which those from `first` on are awaited."""
    keys = tuple(key(number) for number in range(count))
    awaited = tuple(range(first, count))
    return mv.TransferJob(name, keys, tuple(range(count)), awaited=awaited, await_s=await_s, **more)


def put(pool: FaultyPool, *numbers: int) -> None:
    pool.blocks |= {key(number): bytes_of(number) for number in numbers}


# --- what to do next ---------------------------------------------------------------------------------------------


def test_nothing_missing_is_not_awaited() -> None:
    assert AwaitedBlocks([], node="", deadline_s=9.0).begin(0.0) is NextStep.DONE
    assert AwaitedBlocks([3], node="", deadline_s=9.0).begin(9.0) is NextStep.LOOK


def test_news_are_taken_until_all_are_there() -> None:
    awaited = AwaitedBlocks([1, 2, 5], node="n", deadline_s=9.0)
    assert awaited.begin(0.0) is NextStep.WATCH and awaited.watched == (1, 2, 5)
    assert awaited.heard([2], WatchState.MORE) is NextStep.WAIT
    assert awaited.missing == [1, 5]
    assert awaited.heard([1, 5], WatchState.ALL) is NextStep.DONE


@pytest.mark.parametrize("state", [WatchState.GIVEN_UP, WatchState.TIMEOUT, WatchState.UNREACHABLE])
def test_a_wait_that_ends_without_all_looks_once_more(state: WatchState) -> None:
    awaited = AwaitedBlocks([1, 2], node="", deadline_s=9.0)
    assert awaited.heard([1], state) is NextStep.LOOK
    assert awaited.looked([2], 1.0) is NextStep.DONE
    late = AwaitedBlocks([1, 2], node="", deadline_s=9.0)
    assert late.heard([], state) is NextStep.LOOK
    assert late.looked([], 9.0) is NextStep.OVER


def test_the_block_that_was_given_up_is_found_by_halves() -> None:
    awaited = AwaitedBlocks(range(9), node="", deadline_s=9.0)
    assert awaited.heard([], WatchState.GIVEN_UP) is NextStep.LOOK
    assert awaited.looked([], 1.0) is NextStep.WATCH
    assert awaited.watched == (0, 1, 2, 3)
    for count in (2, 1):
        assert awaited.heard([], WatchState.GIVEN_UP) is NextStep.WATCH
        assert awaited.watched == tuple(range(count))
    assert awaited.heard([], WatchState.GIVEN_UP) is NextStep.LOOK
    assert awaited.looked([], 1.0) is NextStep.OVER
    other = AwaitedBlocks(range(9), node="", deadline_s=9.0)
    other.heard([], WatchState.GIVEN_UP)
    other.looked([], 1.0)
    assert other.heard([0, 1, 2, 3], WatchState.ALL) is NextStep.WATCH
    assert other.watched == (4, 5, 6, 7, 8)


def test_a_dead_node_is_left_and_a_dead_pool_is_asked_again_later() -> None:
    awaited = AwaitedBlocks([4], node="n", deadline_s=9.0)
    awaited.heard([], WatchState.UNREACHABLE)
    assert awaited.looked([], 1.0) is NextStep.WATCH
    assert awaited.node == ""
    pauses_s = []
    for _ in range(3):
        awaited.heard([], WatchState.UNREACHABLE)
        assert awaited.looked([], 1.0) is NextStep.RETRY
        pauses_s.append(awaited.pause_s)
        assert awaited.looked([], 1.0) is NextStep.WATCH, "and waits anew"
    assert pauses_s == sorted(set(pauses_s))
    awaited.retries = 10_000
    assert awaited.pause_s < 1.0


def test_a_node_whose_time_is_over_at_once_is_not_asked_without_a_pause() -> None:
    awaited = AwaitedBlocks([4], node="n", deadline_s=9.0)
    for _ in range(3):
        assert awaited.heard([], WatchState.TIMEOUT) is NextStep.LOOK
        assert awaited.looked([], 1.0) is NextStep.RETRY
        assert awaited.looked([], 2.0) is NextStep.WATCH


def test_more_blocks_than_one_wait_takes_are_awaited_in_turn() -> None:
    awaited = AwaitedBlocks(range(KEYS_MAX + 2), node="", deadline_s=9.0)
    assert len(awaited.watched) == KEYS_MAX
    assert awaited.heard(awaited.watched, WatchState.ALL) is NextStep.WATCH
    assert awaited.watched == (KEYS_MAX, KEYS_MAX + 1)


# --- streams -----------------------------------------------------------------------------------------------------


def test_what_has_come_is_loaded_while_the_rest_is_awaited(
    faulty: FaultyPool, faulty_link: PoolLink, movers: list[mv.Mover]
) -> None:
    engine = Engine(200)
    mover = make(faulty_link, engine, load_threads=1)
    movers.append(mover)
    put(faulty, 0, 1)
    mover.load(streamed(6, first=2, node="n2"))
    wait_until(lambda: engine.block(1) == bytes_of(1), "what was there is loaded")
    put(faulty, 2)
    wait_until(lambda: engine.block(2) == bytes_of(2), "the next one is loaded as it comes")
    assert mover.take_loads() == [] and mover.loading == 1
    put(faulty, 4)  # out of turn
    mover.load(job("other", [key(0)], [9]))  # a load that waits holds no thread
    assert wait_for(mover, mover.take_loads).name == "other"
    put(faulty, 3, 5)
    report = wait_for(mover, mover.take_loads)
    assert (report.name, report.loaded, report.reason) == ("l", 6, "")
    assert [engine.block(number) for number in range(6)] == [bytes_of(number) for number in range(6)]
    assert faulty.watched == [("n2", 4)]
    assert "exists" not in faulty.calls and "match" not in faulty.calls, "nothing is polled"
    assert 0 < report.waited_s <= report.seconds
    assert 0 < report.hidden_s <= report.waited_s
    assert report.transfer_s >= report.hidden_s


@pytest.mark.parametrize("came", [0, 3])
def test_what_does_not_come_in_time_is_not_loaded(
    faulty: FaultyPool, faulty_link: PoolLink, movers: list[mv.Mover], came: int
) -> None:
    engine = Engine(200)
    mover = make(faulty_link, engine)
    movers.append(mover)
    put(faulty, *range(came), *range(came + 1, 6))  # with a hole
    mover.load(streamed(6, await_s=0.05))
    report = wait_for(mover, mover.take_loads)
    assert (report.loaded, report.reason) == (came, mv.MoveFailure.NOT_COME)
    assert [engine.block(number) for number in range(came)] == [bytes_of(number) for number in range(came)]
    assert engine.block(came) == bytes([200]) * BLOCK_BYTES
    assert report.waited_s >= 0.05


@pytest.mark.parametrize("came", [0, 2])
def test_a_writer_that_gives_up_ends_the_stream(
    faulty: FaultyPool, faulty_link: PoolLink, movers: list[mv.Mover], came: int
) -> None:
    mover = make(faulty_link, Engine())
    movers.append(mover)
    put(faulty, *range(came))
    mover.load(streamed(8))
    wait_until(lambda: faulty.watched, "it waits")
    faulty.give_up([key(number) for number in range(came, 8)], timeout_s=1.0)
    report = wait_for(mover, mover.take_loads)
    assert (report.loaded, report.reason) == (came, mv.MoveFailure.NOT_COME)
    assert report.waited_s < WAIT_S / 2


def test_a_deadline_in_the_past_takes_what_is_there(
    faulty: FaultyPool, faulty_link: PoolLink, movers: list[mv.Mover]
) -> None:
    mover = make(faulty_link, Engine())
    movers.append(mover)
    put(faulty, 0, 1)
    mover.load(streamed(4, await_s=0.0))
    report = wait_for(mover, mover.take_loads)
    assert (report.loaded, report.reason) == (2, mv.MoveFailure.NOT_COME)
    assert faulty.watched == []


def test_a_node_that_says_a_block_is_there_and_has_it_not_is_not_believed(
    faulty: FaultyPool, faulty_link: PoolLink, movers: list[mv.Mover]
) -> None:
    mover = make(faulty_link, Engine())
    movers.append(mover)
    put(faulty, 0, 1, 2)
    faulty.codes = {key(1): ChecksumMismatch.code}
    mover.load(streamed(3))
    report = wait_for(mover, mover.take_loads)
    assert (report.loaded, report.reason) == (1, mv.MoveFailure.CHECKSUM)
    faulty.codes, faulty.sizes = {}, {key(2): 1}
    mover.load(streamed(3))
    report = wait_for(mover, mover.take_loads)
    assert (report.loaded, report.reason) == (2, mv.MoveFailure.WRONG_SIZE)


def test_a_cancelled_stream_ends_at_once_and_writes_no_late_byte(
    faulty: FaultyPool, faulty_link: PoolLink, movers: list[mv.Mover]
) -> None:
    engine = Engine(200)
    mover = make(faulty_link, engine)
    movers.append(mover)
    put(faulty, 0)
    mover.load(streamed(4))
    wait_until(lambda: engine.block(0) == bytes_of(0), "the first one is there")
    wait_until(lambda: mover._loading["l"].stream.is_parked, "it waits")
    mover.cancel("l")
    report = wait_for(mover, mover.take_loads)
    assert (report.loaded, report.reason) == (1, mv.MoveFailure.CANCELLED)
    put(faulty, 1, 2, 3)
    mover.load(job("later", [key(3)], [9]))
    assert wait_for(mover, mover.take_loads).loaded == 1
    assert engine.block(1) == bytes([200]) * BLOCK_BYTES
    wait_until(lambda: mover._watcher.waiting == 0, "the wait is withdrawn")


def test_a_stream_that_is_cancelled_while_it_moves_bytes_is_reported_after_them(
    faulty: FaultyPool, faulty_link: PoolLink, movers: list[mv.Mover]
) -> None:
    mover = make(faulty_link, Engine())
    movers.append(mover)
    put(faulty, 0)
    faulty.gate = threading.Event()
    mover.load(streamed(3, first=1))
    wait_until(lambda: "get" in faulty.calls, "bytes move")
    mover.cancel("l")
    assert mover.take_loads() == []
    faulty.gate.set()
    report = wait_for(mover, mover.take_loads)
    assert (report.loaded, report.reason) == (1, mv.MoveFailure.CANCELLED)


def test_closing_ends_streams(faulty: FaultyPool, faulty_link: PoolLink) -> None:
    mover = make(faulty_link, Engine())
    for number in range(5):
        mover.load(streamed(3, name=f"l{number}"))
    wait_until(lambda: len(faulty.watched) == 5, "all wait")
    mover.close()
    assert {report.reason for report in mover.take_loads()} == {mv.MoveFailure.CANCELLED}
    assert mover.loading == 0


def test_many_streams_share_one_watch_and_two_threads(
    faulty: FaultyPool, faulty_link: PoolLink, movers: list[mv.Mover], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mv, "STREAMS_MAX", 40)
    threads = threading.active_count()
    mover = make(faulty_link, Engine())
    movers.append(mover)
    put(faulty, 0)
    for number in range(45):
        mover.load(streamed(3, name=f"l{number}"))
    reports: list[mv.LoadReport] = []
    wait_until(lambda: reports.extend(mover.take_loads()) or len(reports) == 5, "those beyond the limit end")
    assert {(report.loaded, report.reason) for report in reports} == {(1, mv.MoveFailure.NOT_COME)}
    assert threading.active_count() <= threads + 4  # loads, saves, the watch
    put(faulty, 1, 2)
    wait_until(lambda: reports.extend(mover.take_loads()) or len(reports) == 45, "all have ended")
    assert [report.loaded for report in reports].count(3) == 40


def test_a_pool_that_breaks_while_blocks_are_awaited_has_a_while_to_come_back(
    faulty: FaultyPool, faulty_link: PoolLink, movers: list[mv.Mover], monkeypatch: pytest.MonkeyPatch
) -> None:
    mover = make(faulty_link, Engine())
    movers.append(mover)
    faulty.unwatchable = {"n1", None}
    faulty.error = NodeUnavailable("gone")
    mover.load(streamed(3, node="n1"))
    wait_until(lambda: faulty.calls.count("exists") >= 3, "it looks again")
    assert mover.take_loads() == []
    put(faulty, 0, 1, 2)
    faulty.error = None
    assert wait_for(mover, mover.take_loads).loaded == 3
    monkeypatch.setattr(streams, "PATIENCE_S", 0.0)
    faulty.error = NodeUnavailable("gone")
    mover.load(streamed(3, node="n1"))
    report = wait_for(mover, mover.take_loads)
    assert report.loaded == 0 and report.waited_s < WAIT_S / 2


def test_a_pool_that_goes_away_ends_the_stream(
    faulty: FaultyPool, movers: list[mv.Mover], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(streams, "PATIENCE_S", 0.05)
    link = PoolLink(lambda: faulty)
    assert link.connected.wait(WAIT_S)
    mover = make(link, Engine())
    movers.append(mover)
    mover.load(streamed(3))
    wait_until(lambda: faulty.watched, "it waits")
    link.close()
    assert wait_for(mover, mover.take_loads).loaded == 0


# --- saves that others wait for ----------------------------------------------------------------------------------


def saved(name: str, numbers: list[int], **more: Any) -> mv.TransferJob:
    return mv.TransferJob(name, tuple(key(n) for n in numbers), tuple(range(len(numbers))), **more)


def test_a_save_goes_to_the_node_where_its_blocks_are_awaited(
    faulty: FaultyPool, faulty_link: PoolLink, movers: list[mv.Mover]
) -> None:
    mover = make(faulty_link, Engine())
    movers.append(mover)
    mover.save(saved("s", [0, 1], node="n2", is_awaited=True))
    assert wait_for(mover, mover.take_saves).stored == (0, 1)
    assert faulty.preferred == ["n2"] and "give_up" not in faulty.calls


def test_blocks_that_are_lost_or_lie_elsewhere_are_given_up(
    faulty: FaultyPool, faulty_link: PoolLink, movers: list[mv.Mover]
) -> None:
    given_up: list[tuple[list[bytes], str | None]] = []

    def give_up(keys: Any, *, node: str | None = None, timeout_s: float) -> int:
        given_up.append((list(keys), node))
        return 0

    faulty.give_up = give_up  # type: ignore[method-assign]
    mover = make(faulty_link, Engine(), save_queue_bytes_max=4 * BLOCK_BYTES)
    movers.append(mover)
    put(faulty, 0)
    faulty.codes, faulty.elsewhere = {key(1): 300}, {key(2)}
    mover.save(saved("s", [0, 1, 2, 3], node="n2", is_awaited=True))
    report = wait_for(mover, mover.take_saves)
    assert (report.stored, report.lost) == ((0, 2, 3), {mv.MoveFailure.FULL: 1})
    assert given_up == [([key(0), key(1), key(2)], "n2")]
    mover.save(saved("any", [1, 2], is_awaited=True))
    wait_for(mover, mover.take_saves)
    assert given_up[1:] == [([key(1)], None)], "without a node only what is lost"
    mover.save(saved("too many", [4, 5, 6, 7, 8], node="n2", is_awaited=True))
    assert wait_for(mover, mover.take_saves).lost == {mv.MoveFailure.FULL: 5}
    wait_until(lambda: len(given_up) == 3, "what does not fit is given up")
    mover.save(saved("plain", [1]))
    wait_for(mover, mover.take_saves)
    assert len(given_up) == 3


def test_a_stream_hears_of_a_save_that_is_lost(
    faulty: FaultyPool, faulty_link: PoolLink, movers: list[mv.Mover]
) -> None:
    writer, reader = make(faulty_link, Engine()), make(faulty_link, Engine())
    movers += [writer, reader]
    reader.load(streamed(4, node="n1"))
    wait_until(lambda: faulty.watched, "it waits")
    faulty.codes = {key(2): 300}
    started_s = time.monotonic()
    writer.save(saved("s", [0, 1, 2, 3], node="n1", is_awaited=True))
    report = wait_for(reader, reader.take_loads)
    assert (report.loaded, report.reason) == (2, mv.MoveFailure.NOT_COME)
    assert time.monotonic() - started_s < WAIT_S / 2
