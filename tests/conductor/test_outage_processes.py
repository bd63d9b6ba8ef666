"""No conductor leads for a while, as processes under load: every end of a request reaches the one that leads then."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Iterator

import pytest

from mooncache.bench.gateway.stack import Stack, start_stack
from mooncache.bench.survival.conductor import CLIENTS, FAMILIES
from mooncache.proto.v1 import conductor_pb2 as pb
from tests.conditions import until
from tests.conductor.test_standby_processes import (
    BUSY,
    ask_at,
    in_order,
    old_request,
    planned,
    under_load,
    why,
)
from tests.processes import freeze

pytestmark = pytest.mark.timeout(300)
OUTAGE_S = 10.0  # beyond the deadline of a report, and of a plan


@pytest.fixture(scope="module")
def stack() -> Iterator[Stack]:
    """Two conductors, a gateway, and engines whose answers take long enough to end in an outage."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in BUSY.items():
            patch.setenv(name, value)
        with start_stack(conductors=2, families=FAMILIES, engine=("--first-token-s", "3")) as found:
            for part in found.conductors:
                part.env.update(BUSY)
            yield found


async def counted(stack: Stack) -> int:
    answer = await ask_at(
        stack, None, "GetConductorStatus", pb.GetConductorStatusRequest(), pb.GetConductorStatusResponse
    )
    return int(answer.active_request_count)


@pytest.mark.parametrize("fault", ["stopped", "killed"])
async def test_ends_of_requests_wait_for_a_conductor_that_leads(stack: Stack, fault: str) -> None:
    await in_order(stack)
    async with under_load(stack) as requests:
        ending: list[asyncio.Task[str]] = []

        async def some_are_counted() -> bool:
            """More are counted than the load has, so some of these are. On a busy machine not every one has a plan."""
            ending[:] = [task for task in ending if not task.done()]
            ending.extend(asyncio.create_task(old_request(stack)) for _ in range(8 - len(ending)))
            return await counted(stack) > CLIENTS

        await until(some_are_counted, "requests are counted", every_s=0.1)
        ending[:] = [task for task in ending if not task.done()]
        served = len(requests.served)
        for part in stack.conductors:
            if fault == "stopped":
                assert part.process is not None
                freeze(part.process.pid)
            else:
                part.send(signal.SIGKILL)
        await asyncio.sleep(OUTAGE_S)  # the fault itself
        assert len(requests.served) > served, "requests go on without a conductor"
        ended = await asyncio.gather(*ending)
        for part in stack.conductors:
            if fault == "stopped":
                part.send(signal.SIGCONT)
            else:
                part.wait(5.0)
                part.start()
        await in_order(stack)
        await planned(requests, "scheduled again")

    async def none_is_counted() -> bool:
        return await counted(stack) == 0

    # A plan whose answer was lost without a sign is closed by the next list of what is under way, within 81 s.
    await until(none_is_counted, "every end has been heard", 200.0, every_s=0.2)
    if fault == "stopped":  # else no conductor knows of them any more
        # A conductor on a busy machine may have answered too late to plan some of them.
        states = [(await why(stack, name))["state"] for name in ended if name != "unscheduled"]
        assert set(states) == {"finished"}, "word of their ends came, and they were not merely given up"
