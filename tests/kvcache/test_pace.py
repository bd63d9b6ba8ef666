"""Loads that have to keep pace with computing: they begin small, and one that falls behind is cut."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from mooncache.errors import ChecksumMismatch, DeadlineExceeded
from mooncache.kvcache import mover as mv
from mooncache.kvcache.core.break_even import Pace
from mooncache.kvcache.pool_link import Breaker, PoolLink
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


@pytest.fixture
def small_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    """A load that keeps pace begins with two blocks."""
    monkeypatch.setattr(mv, "FIRST_BATCH_BYTES", 2 * BLOCK_BYTES)


def paced(keys: list[bytes], grace_s: float, block_s: float) -> mv.TransferJob:
    return mv.TransferJob("l", tuple(keys), tuple(range(len(keys))), pace=Pace(grace_s, block_s))


@pytest.mark.usefixtures("small_batches")
def test_batches_grow_while_a_load_keeps_pace(
    faulty: FaultyPool, faulty_link: PoolLink, movers: list[mv.Mover]
) -> None:
    engine = Engine()
    mover = make(faulty_link, engine)
    movers.append(mover)
    faulty.blocks = {key(i): bytes([i + 1]) * BLOCK_BYTES for i in range(14)}
    mover.load(paced([key(i) for i in range(14)], WAIT_S, 0.0))
    report = wait_for(mover, mover.take_loads)
    assert (report.loaded, report.reason) == (14, "")
    assert faulty.calls.count("get") == 3  # 2, 4, 8 blocks
    assert all(engine.block(i) == bytes([i + 1]) * BLOCK_BYTES for i in range(14))


@pytest.mark.usefixtures("small_batches")
@pytest.mark.parametrize("came", [0, 1, 2, 5, 13])
def test_a_path_that_stalls_is_cut_and_what_has_come_counts(
    faulty: FaultyPool, faulty_link: PoolLink, movers: list[mv.Mover], came: int
) -> None:
    engine = Engine()
    mover = make(faulty_link, engine, load_timeout_s=WAIT_S)
    movers.append(mover)
    faulty.blocks = {key(i): bytes([i + 1]) * BLOCK_BYTES for i in range(14)}
    faulty.stalls_after = came
    mover.load(paced([key(i) for i in range(14)], 0.05, 0.05))
    report = wait_for(mover, mover.take_loads)
    # On a busy machine it may fall behind before it stalls; a prefix is what it has either way.
    assert report.reason == mv.MoveFailure.TOO_SLOW
    assert report.loaded <= came
    assert all(engine.block(i) == bytes([i + 1]) * BLOCK_BYTES for i in range(report.loaded))
    faulty.stalls_after = None
    mover.load(job("next", [key(1)], [0]))
    assert wait_for(mover, mover.take_loads).loaded == 1, "a path that was cut has not failed"


def test_a_load_that_fails_before_it_is_cut_says_why(
    faulty: FaultyPool, faulty_link: PoolLink, movers: list[mv.Mover]
) -> None:
    mover = make(faulty_link, Engine())
    movers.append(mover)
    faulty.blocks = {key(i): bytes(BLOCK_BYTES) for i in range(3)}
    faulty.codes[key(1)] = ChecksumMismatch.code
    mover.load(paced([key(i) for i in range(3)], WAIT_S, 0.0))
    report = wait_for(mover, mover.take_loads)
    assert (report.loaded, report.reason) == (1, mv.MoveFailure.CHECKSUM)


def test_a_call_that_ran_out_of_its_short_time_is_no_failure_of_the_pool(
    faulty: FaultyPool, movers: list[mv.Mover]
) -> None:
    link = PoolLink(lambda: faulty, breaker=Breaker(failures_max=1))
    assert link.connected.wait(WAIT_S)
    mover = make(link, Engine())
    movers.append(mover)
    faulty.error = DeadlineExceeded("late")
    mover.load(paced([key(1)], WAIT_S / 2, 0.0))
    report = wait_for(mover, mover.take_loads)
    assert report.reason == mv.MoveFailure.TIMEOUT, "the limit of loads comes first"
    assert not link.usable
    link.close()
    link = PoolLink(lambda: faulty, breaker=Breaker(failures_max=1))
    assert link.connected.wait(WAIT_S)
    mover = make(link, Engine(), load_timeout_s=WAIT_S)
    movers.append(mover)
    mover.load(paced([key(1)], WAIT_S / 2, 0.0))
    report = wait_for(mover, mover.take_loads)
    assert (report.loaded, report.reason) == (0, mv.MoveFailure.TOO_SLOW)
    assert link.usable
    link.close()
