"""Which blocks come up from disks after a decision, and the calls for it."""

from __future__ import annotations

import asyncio
import random
from typing import Any

from mooncache.conductor.core import prefetches
from mooncache.conductor.core.decisions import Decision, PoolAnswer, PoolState, SchedulingRequest
from mooncache.conductor.core.placed import PlacedRun
from mooncache.conductor.core.registry import InstanceInfo, InstanceState
from mooncache.conductor.core.scheduler import Scheduler
from mooncache.conductor.shell.instruments import ConductorMetrics
from mooncache.conductor.shell.prefetch_calls import OPEN_MAX, PrefetchCalls
from mooncache.errors import NodeUnavailable
from mooncache.kvcache.block_index import native_index
from mooncache.runtime.metrics import Metrics
from tests.conditions import until
from tests.conductor.support import BLOCK, chain, scheduler_settings

ON_A = frozenset({"host-a"})
KEYS = chain("x", 40)


def test_the_blocks_on_disks_that_will_be_loaded_come_up_first() -> None:
    keys = chain("x", 10)
    runs = (PlacedRun(2, False, ON_A), PlacedRun(3, True, frozenset()), PlacedRun(4, False, ON_A))
    several = (*runs, PlacedRun(1, True, frozenset()))

    def found(*args: int) -> list[int]:
        packed = prefetches.ssd_keys(keys, several, *args)
        return [keys.index(packed[at : at + 32]) // 32 for at in range(0, len(packed), 32)]

    assert found(0, 10 * BLOCK, BLOCK) == [2, 3, 4, 9]
    assert found(3 * BLOCK, 9 * BLOCK, BLOCK) == [3, 4], "the instance has the others, or does not load them"
    assert found(6 * BLOCK, 9 * BLOCK, BLOCK) == []
    assert found(0, 10 * BLOCK, 0) == []


def decided(runs: tuple[PlacedRun, ...]) -> Decision:
    core = Scheduler(scheduler_settings(), random.Random(1), native_index)
    info = InstanceInfo("a", 1, "both", "m", group=5, kv_bytes_per_token=1000, block_tokens=BLOCK)
    core.register(info, InstanceState.READY, 0.0)
    asked = SchedulingRequest("r", "m", 40 * BLOCK, keys=KEYS, max_output_tokens=8)
    return core.schedule(asked, PoolAnswer(PoolState.OK, 32, runs=runs), 0.0, 0.0)


class Pool:
    """Answers when `go` is set."""

    def __init__(self) -> None:
        self.go = asyncio.Event()
        self.asked: list[bytes] = []
        self.error: Exception | None = None

    async def prefetch(self, keys: bytes, begin_s: float, tenant: str) -> int:
        self.asked.append(keys)
        await self.go.wait()
        if self.error is not None:
            raise self.error
        return len(keys) // 32


def counted(instruments: ConductorMetrics, outcome: str) -> float:
    return instruments.prefetches.labels(outcome)._value.get()  # type: ignore[no-any-return]


def test_each_decision_makes_one_call_at_most_and_waits_for_none() -> None:
    cold = decided((PlacedRun(30, False, ON_A), PlacedRun(2, True, frozenset())))
    warm = decided((PlacedRun(32, False, ON_A),))

    async def scenario() -> None:
        pool: Any = Pool()
        instruments = ConductorMetrics(Metrics("conductor"))
        calls = PrefetchCalls(pool, instruments)
        calls.start(warm, KEYS)
        await asyncio.sleep(0)
        assert not pool.asked
        for _ in range(OPEN_MAX + 3):
            calls.start(cold, KEYS)
        await asyncio.sleep(0)
        assert pool.asked == [KEYS[30 * 32 : 32 * 32]] * OPEN_MAX
        assert counted(instruments, "dropped") == 3
        pool.go.set()
        await until(lambda: counted(instruments, "ok") == OPEN_MAX, "all calls have ended")
        assert instruments.prefetched_blocks._value.get() == 2 * OPEN_MAX  # type: ignore[attr-defined]
        pool.error = NodeUnavailable("gone")
        calls.start(cold, KEYS)
        await until(lambda: counted(instruments, NodeUnavailable.name) == 1, "a failure is counted")
        await calls.close()

    asyncio.run(scenario())
