"""Blocks in GPU memory, over a fake driver: all layers of a block arrive, behind the engine's step, and neither a
wait without end nor a block that is given away while a copy may still write into it."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from typing import Any

import pytest

from mooncache.client import staging
from mooncache.client.native_call import call_native
from mooncache.errors import ChecksumMismatch, DeadlineExceeded, InvalidArgument, TransportUnavailable
from mooncache.kvcache import mover as mv
from mooncache.kvcache.layerwise import LayerSaver
from mooncache.kvcache.memory import InDoubt
from mooncache.kvcache.pool_link import PoolLink
from tests.conditions import wait_until
from tests.gpu.fake_gpu import FakeGpu
from tests.kvcache.faulty import WAIT_S, FaultyPool
from tests.kvcache.gpu_engine import BLOCK_BYTES, BLOCKS, STEP, Engine, expected

LATER_S = 10.0


def soon() -> float:
    return time.monotonic() + LATER_S


@pytest.fixture(params=[True, False], ids=["kernel", "copies"])
def gpu(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeGpu]:
    made = FakeGpu(kernel=request.param)
    monkeypatch.setattr(staging, "open_device", lambda _ordinal: made.device)
    monkeypatch.setattr(staging, "GRACE_S", 0.02)
    yield made
    made.restore()
    deadline_s = soon()
    while staging.UNFINISHED_COPIES.size_bytes():
        assert time.monotonic() < deadline_s


@pytest.fixture
def engine(gpu: FakeGpu) -> Engine:
    return Engine(gpu)


def test_blocks_are_gathered_and_scattered(engine: Engine) -> None:
    assert engine.memory.block_bytes == BLOCK_BYTES
    for block in range(BLOCKS):
        engine.write(block, 10 * block + 1)
    with engine.memory.reading([5, 0, 7], engine.memory.fence(), soon()) as values:
        assert [b"".join(value) for value in values] == [expected(51), expected(1), expected(71)]
    with engine.memory.writing([2, 3], engine.memory.fence(), soon()) as places:
        for place, value in zip(places, (101, 201), strict=True):
            place[0][:] = expected(value)
    assert [engine.read(block) for block in (1, 2, 3, 4)] == [
        expected(11),
        expected(101),
        expected(201),
        expected(41),
    ]
    between = engine.layers[0].read()[2 * STEP + 1_000 : 2 * STEP + 1_024]
    assert between == bytes(24)  # what lies between the ranges is nobody's


def test_one_layer_of_some_blocks_is_gathered(engine: Engine) -> None:
    for block in range(BLOCKS):
        engine.write(block, 10 * block + 1)
    part = BLOCK_BYTES // 2
    assert engine.memory.layer_bytes == [part, part]
    with engine.memory.reading_layer(1, [6, None, 2], engine.memory.fence(), soon()) as layer:
        source, places = layer
        assert (source.step_bytes, list(source.ranges), places) == (part, [(0, part)], [0, None, 1])
        assert bytes(memoryview(source.buffer)[: 2 * part]) == bytes([62]) * part + bytes([22]) * part


def test_layers_of_a_gpu_are_saved_as_each_is_computed(
    engine: Engine, gpu: FakeGpu, real_link: PoolLink
) -> None:
    saves: list[mv.SaveReport] = []
    saver = LayerSaver(
        real_link, engine.memory, ["a", "b"], saves.append, timeout_s=LATER_S, queue_bytes_max=1 << 20
    )
    names = tuple(os.urandom(32) for _ in range(3))
    job = mv.TransferJob("save", names, (4, 0, 7))
    engine.lazy = True
    saver.layer_done([job], "a")
    for block in (4, 0, 7):
        engine.write(block, 10 * block + 1)  # the step goes on until its event is through
    saver.finish(job)
    assert not saver.wait_saved(0.05)
    for event in engine.events:
        gpu.complete(event)
    assert saver.wait_saved(LATER_S)
    saver.close()
    ((stored, staged, lost),) = [(save.stored, save.staged_bytes, save.lost) for save in saves]
    assert (stored, staged, lost) == ((0, 1, 2), 3 * BLOCK_BYTES, {})
    client = real_link.client()
    assert client is not None
    values = [bytearray(BLOCK_BYTES) for _ in names]
    assert client.get_many_into(names, values).ok
    assert [bytes(value) for value in values] == [expected(10 * block + 1) for block in (4, 0, 7)]


def test_a_gpu_that_hangs_costs_a_save_by_layers_its_blocks(
    engine: Engine, gpu: FakeGpu, real_link: PoolLink
) -> None:
    saves: list[mv.SaveReport] = []
    saver = LayerSaver(
        real_link, engine.memory, ["a", "b"], saves.append, timeout_s=0.2, queue_bytes_max=1 << 20
    )
    gpu.hang(True)
    saver.finish(mv.TransferJob("save", (key(1), key(2)), (4, 0)))
    assert saver.wait_saved(LATER_S)
    gpu.hang(False)
    saver.close()
    assert [(save.stored, save.lost) for save in saves] == [((), {mv.MoveFailure.TIMEOUT: 2})]


def test_copies_wait_for_the_step_on_the_device(engine: Engine, gpu: FakeGpu) -> None:
    engine.lazy = True
    fence = engine.memory.fence()
    with (
        pytest.raises(DeadlineExceeded),
        engine.memory.reading([1], fence, time.monotonic() + 0.03),
    ):
        raise AssertionError("the step has not ended")
    engine.write(1, 9)
    gpu.complete((fence.event, fence.handle))
    with engine.memory.reading([1], fence, soon()) as values:
        assert bytes(values[0][0]) == expected(9)


def test_a_block_that_is_written_too_long_is_in_doubt(engine: Engine, gpu: FakeGpu) -> None:

    def write() -> None:
        with engine.memory.writing([4], engine.memory.fence(), time.monotonic() + 1.0) as places:
            places[0][0][:] = expected(3)
            gpu.hang(True)

    with pytest.raises(InDoubt) as caught:
        write()
    doubt = caught.value
    assert doubt.error.code == DeadlineExceeded.code
    assert not doubt.settled() and staging.UNFINISHED_COPIES.size_bytes()
    doubt.wait(lambda _pause_s: True)  # the engine ends
    gpu.hang(False)
    doubt.wait(lambda pause_s: bool(time.sleep(pause_s)))
    assert doubt.settled() and engine.read(4) == expected(3)
    assert not staging.UNFINISHED_COPIES.size_bytes()


def test_failing_copies_are_errors_and_the_next_ones_work(engine: Engine, gpu: FakeGpu) -> None:
    gpu.fail("cuMemcpyDtoHAsync", 700)
    with pytest.raises(TransportUnavailable, match="700"), engine.memory.reading([1], None, soon()):
        pass
    gpu.fail("cuMemcpyHtoDAsync", 700)
    with pytest.raises(TransportUnavailable, match="700"), engine.memory.writing([1], None, soon()):
        pass
    gpu.fail("cuStreamWaitEvent", 400)
    with (
        pytest.raises(TransportUnavailable, match="400"),
        engine.memory.writing([1], engine.memory.fence(), soon()),
    ):
        pass
    with pytest.raises(InvalidArgument, match="no block 8"), engine.memory.reading([8], None, soon()):
        pass
    engine.write(1, 5)
    with engine.memory.reading([1], None, soon()) as values:
        assert bytes(values[0][0]) == expected(5)


def test_bytes_that_change_on_the_way_are_noticed(engine: Engine, gpu: FakeGpu) -> None:
    with engine.memory.reading([0], None, soon()):
        pass
    gpu.wrong_kernel(True)
    if not call_native(gpu.device.make_stager, 4_096, 1).how.startswith("one launch"):
        pytest.skip("there are no checksums without the kernel")
    with pytest.raises(ChecksumMismatch), engine.memory.reading([0], None, soon()):
        pass
    with pytest.raises(ChecksumMismatch), engine.memory.writing([0], None, soon()):
        pass


@pytest.fixture
def mover(faulty_link: PoolLink, engine: Engine) -> Iterator[mv.Mover]:
    made = mv.Mover(
        faulty_link,
        engine.memory,
        load_threads=1,
        save_threads=1,
        load_timeout_s=0.2,
        save_timeout_s=0.2,
        save_queue_bytes_max=1 << 20,
    )
    yield made
    made.close()


def take(mover: mv.Mover, reports: Any) -> Any:
    return wait_until(reports, "a report")[0]


def key(number: int) -> bytes:
    return number.to_bytes(32, "big")


def test_a_mover_moves_blocks_of_a_gpu(engine: Engine, mover: mv.Mover, faulty: FaultyPool) -> None:
    for block in range(4):
        engine.write(block, block + 1)
    names = tuple(key(number) for number in range(4))
    mover.save(mv.TransferJob("save", names, (0, 1, 2, 3)))
    assert take(mover, mover.take_saves).stored == (0, 1, 2, 3)
    assert faulty.blocks[key(2)] == expected(3)
    mover.load(mv.TransferJob("load", names, (7, 6, 5, 4)))
    report = take(mover, mover.take_loads)
    assert (report.loaded, report.reason) == (4, "")
    assert [engine.read(block) for block in (7, 6, 5, 4)] == [expected(value) for value in (1, 2, 3, 4)]


def test_a_load_is_reported_when_the_gpu_is_through_with_its_blocks(
    engine: Engine, mover: mv.Mover, faulty: FaultyPool, gpu: FakeGpu
) -> None:
    faulty.blocks[key(1)] = expected(8)
    gpu.hang(True)
    mover.load(mv.TransferJob("load", (key(1),), (6,)))
    assert faulty.entered.wait(WAIT_S)
    time.sleep(0.5)
    assert not mover.take_loads() and mover.loading == 1  # the time limit has passed, the copy has not ended
    gpu.hang(False)
    report = take(mover, mover.take_loads)
    assert (report.loaded, report.reason) == (0, mv.MoveFailure.TIMEOUT)


def test_a_save_of_a_gpu_that_hangs_ends_at_its_limit(
    engine: Engine, mover: mv.Mover, faulty: FaultyPool, gpu: FakeGpu
) -> None:
    gpu.hang(True)
    mover.save(mv.TransferJob("save", (key(1),), (6,)))
    report = take(mover, mover.take_saves)
    assert (report.stored, report.lost) == ((), {mv.MoveFailure.TIMEOUT: 1})
    assert not faulty.blocks
    assert report.seconds >= 0.2


def test_an_engine_may_end_while_a_gpu_hangs(
    engine: Engine, mover: mv.Mover, faulty: FaultyPool, gpu: FakeGpu
) -> None:
    faulty.blocks[key(1)] = expected(8)
    gpu.hang(True)
    mover.load(mv.TransferJob("load", (key(1),), (6,)))
    assert faulty.entered.wait(WAIT_S)
    mover.close()
    assert take(mover, mover.take_loads).loaded == 0
