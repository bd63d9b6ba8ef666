"""Duties: a failure is counted and tried again, and never ends the others."""

from __future__ import annotations

import asyncio
import itertools

from mooncache.errors import MasterUnavailable
from mooncache.runtime.clock import LoopClock
from mooncache.runtime.duties import PAUSE_MAX_S, Duty, DutyRunner
from mooncache.testing import virtual_time


def test_failures_back_off_and_recover() -> None:
    async def main() -> tuple[list[float], list[tuple[str, str]], int]:
        clock, starts, failures, ticks = LoopClock(), [], [], 0

        async def flaky() -> None:
            starts.append(clock.now_s())
            if len(starts) <= 9:
                raise MasterUnavailable() if len(starts) % 2 else KeyError("x")

        async def steady() -> None:
            nonlocal ticks
            ticks += 1

        runner = DutyRunner(clock, lambda duty, code: failures.append((duty, code)))
        runner.start([Duty("flaky", flaky, 1.0), Duty("steady", steady, 1.0)])
        await clock.sleep(60)
        await runner.stop()
        await asyncio.sleep(10)
        return starts, failures, ticks

    starts, failures, ticks = virtual_time.run(main())
    pauses = [later - earlier for earlier, later in itertools.pairwise(starts)]
    assert [round(pause, 3) for pause in pauses[:3]] == [0.1, 0.2, 0.4]
    assert max(pauses) <= PAUSE_MAX_S + 1e-6
    assert round(pauses[-1], 3) == 1.0
    assert len(failures) == 9
    assert {code for _, code in failures} == {"MASTER_UNAVAILABLE", "INTERNAL"}
    assert ticks >= 59
