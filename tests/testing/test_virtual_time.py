"""The virtual loop: fast hours, one trace for one seed, refusal of real I/O."""

from __future__ import annotations

import asyncio
import random
import socket

import pytest

from mooncache.runtime.clock import LoopClock, ManualClock
from mooncache.testing import virtual_time
from mooncache.testing.virtual_time import RealIoRefusedError, VirtualDeadlockError, VirtualTimeLoop


async def trace_of_workers() -> list[str]:
    clock, seen = LoopClock(), []
    lock = asyncio.Lock()

    async def worker(name: str) -> None:
        for step in range(3):
            await clock.sleep(3600)
            async with lock:
                seen.append(f"{name}{step}@{clock.now_s():.0f}")

    await asyncio.gather(*(worker(name) for name in "abcd"))
    return seen


def test_one_seed_one_trace() -> None:
    traces = [tuple(virtual_time.run(trace_of_workers(), seed)) for seed in (1, 1, 2, 3, 4)]
    assert traces[0] == traces[1]
    assert len(set(traces)) > 1
    assert all(line.endswith("@10800") for line in traces[0][-4:])


def test_timeouts_use_virtual_time() -> None:
    async def main() -> float:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(86_400):
                await asyncio.get_running_loop().create_future()
        return asyncio.get_running_loop().time()

    assert virtual_time.run(main()) == pytest.approx(86_400)


def test_waiting_for_ever_is_an_error() -> None:
    async def main() -> None:
        await asyncio.get_running_loop().create_future()

    with pytest.raises(VirtualDeadlockError):
        virtual_time.run(main())


def test_real_io_is_refused() -> None:
    async def main() -> None:
        loop = asyncio.get_running_loop()
        with pytest.raises(RealIoRefusedError):
            await asyncio.open_connection("127.0.0.1", 1)
        with pytest.raises(RealIoRefusedError):
            await asyncio.to_thread(print)
        with pytest.raises(RealIoRefusedError):
            await asyncio.create_subprocess_exec("true")
        left, right = socket.socketpair()
        with left, right, pytest.raises(RealIoRefusedError):
            await loop.sock_recv(left, 1)

    virtual_time.run(main())


def test_the_asyncio_privates_that_it_leans_on_exist() -> None:
    """Fails with the name of what a new Python version took away."""
    loop = asyncio.new_event_loop()
    try:
        for name in (
            "_ready",
            "_scheduled",
            "_run_once",
            "_selector",
            "_clock_resolution",
            "_process_events",
        ):
            assert hasattr(loop, name), f"asyncio's BaseEventLoop has no {name} any more; see virtual_time.py"
        assert {"_run_once", "_process_events"} <= set(vars(VirtualTimeLoop))
    finally:
        loop.close()


async def test_manual_clock_wakes_in_order() -> None:
    clock, seen = ManualClock(), []

    async def sleeper(delay_s: float) -> None:
        await clock.sleep(delay_s)
        seen.append(delay_s)

    tasks = [asyncio.ensure_future(sleeper(d)) for d in random.Random(1).sample([1.0, 2.0, 3.0], 3)]
    await asyncio.sleep(0)
    clock.advance(2.5)
    await asyncio.sleep(0.01)
    assert seen == [1.0, 2.0]
    clock.advance(1)
    await asyncio.gather(*tasks)
    assert seen == [1.0, 2.0, 3.0]
