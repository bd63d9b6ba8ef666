"""Conductors as processes under load: killed, stopped, resumed. Requests go on, and what was known is known again."""

from __future__ import annotations

import asyncio
import json
import signal
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import pytest

from mooncache import errors
from mooncache.bench.gateway.stack import BOTH_MODEL, Stack, start_stack
from mooncache.bench.survival.conductor import FAMILIES, Requests, leader_of
from mooncache.client.conductor_link import ConductorLink
from mooncache.cluster.processes import Part
from mooncache.config import load
from mooncache.proto.v1 import conductor_pb2 as pb
from tests.conditions import until
from tests.processes import freeze

pytestmark = pytest.mark.timeout(300)
# On a busy machine a process may be late by more than a second.
BUSY = {
    "MOONCACHE_CONDUCTOR_TAKEOVER_S": "3",
    "MOONCACHE_CONDUCTOR_SUSPECT_AFTER_S": "20",
    "MOONCACHE_CONDUCTOR_LEASE_S": "60",
}
ROLES = {
    pb.CONDUCTOR_ROLE_LEADER: "leader",
    pb.CONDUCTOR_ROLE_STANDBY: "standby",
    pb.CONDUCTOR_ROLE_UNREACHABLE: "unreachable",
}


@pytest.fixture(scope="module")
def stack() -> Iterator[Stack]:
    """Two conductors, a gateway, a pool, engines that answer at once."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in BUSY.items():
            patch.setenv(name, value)
        with start_stack(conductors=2, families=FAMILIES) as found:
            for part in found.conductors:
                part.env.update(BUSY)  # each test has an environment of its own, and starts them again
            yield found


@asynccontextmanager
async def under_load(stack: Stack) -> AsyncIterator[Requests]:
    """Requests come all the time, and none of them fails."""
    requests = Requests(stack)
    clients = asyncio.create_task(requests.run())
    try:
        await until(lambda: len(requests.served) > 20, "the first requests")
        yield requests
        served = len(requests.served)
        await until(lambda: len(requests.served) > served + 20, "the last requests")
    finally:
        requests.end.set()
        await clients
    assert not requests.errors


async def ask_at(stack: Stack, part: Part | None, method: str, request: Any, response: Any) -> Any:
    """One call to one conductor, None: to the one that leads."""
    targets = stack.conductor_target.split(",")
    target = stack.conductor_target if part is None else targets[stack.conductors.index(part)]
    link = ConductorLink(target, stack.token.text, load(env={}), listen=False)
    try:
        return await link.call(method, request, response, 10.0)
    finally:
        await link.close()


async def roles(stack: Stack, part: Part | None = None) -> dict[str, str]:
    """Where each conductor stands, as one of them says."""
    answer = await ask_at(
        stack, part, "GetConductorStatus", pb.GetConductorStatusRequest(), pb.GetConductorStatusResponse
    )
    return {view.target: ROLES.get(view.role, "seeking") for view in answer.conductors}


async def in_order(stack: Stack) -> Part:
    """Return the leader once the other one follows it."""

    async def settled() -> bool:
        try:
            return sorted((await roles(stack)).values()) == ["leader", "standby"]
        except errors.MooncacheError:
            return False

    await until(settled, "a leader and a standby", every_s=0.1)
    return await leader_of(stack)


async def nothing_is_counted(stack: Stack) -> bool:
    answer = await ask_at(
        stack, None, "GetConductorStatus", pb.GetConductorStatusRequest(), pb.GetConductorStatusResponse
    )
    return answer.active_request_count == 0


async def planned(requests: Requests, what: str) -> None:
    """Wait until the latest requests all have a conductor's plan."""
    begin = len(requests.served)
    await until(
        lambda: (
            (last := requests.served[begin:][-20:])
            and len(last) == 20
            and all(one.hit_share is not None for one in last)
        ),
        what,
    )


async def old_request(stack: Stack) -> str:
    """The id of the decision of a request that has ended."""
    body = {"model": BOTH_MODEL, "prompt": FAMILIES.prompt(0, 0), "max_tokens": 2}
    headers = {"authorization": f"Bearer {stack.token.text}"}
    async with aiohttp.ClientSession(headers=headers) as session:
        url = f"http://127.0.0.1:{stack.gateway.port}/v1/completions"
        async with session.post(url, json=body) as answer:
            assert answer.status == 200, await answer.text()
            return answer.headers["x-mooncache-decision"]


async def why(stack: Stack, decision_id: str) -> dict[str, Any]:
    request = pb.GetDecisionRequest(id=decision_id)
    answer = await ask_at(stack, None, "GetDecision", request, pb.GetDecisionResponse)
    found: dict[str, Any] = json.loads(answer.record_json)
    return found


async def test_a_killed_leader_costs_no_request_and_nothing_that_was_known(stack: Stack) -> None:
    leader = await in_order(stack)
    old = await old_request(stack)

    async def ended() -> bool:
        return (await why(stack, old))["state"] == "finished"

    await until(ended, "its end was reported")
    async with under_load(stack) as requests:
        leader.send(signal.SIGKILL)
        await planned(requests, "scheduled by the standby")
        begin_s = requests.served[-1].begun_s
        await planned(requests, "more of them")
        assert requests.hit_share(begin_s, float("inf")) > 0.9, "the new leader knows the caches"
    assert await leader_of(stack) is not leader
    record = await why(stack, old)
    assert (record["state"], record["decision_id"]) == ("finished", old)
    assert record["events"]
    leader.wait(5.0)
    leader.start()
    assert await in_order(stack) is not leader


async def test_a_stopped_leader_is_replaced_and_harmless_when_it_goes_on(stack: Stack) -> None:
    leader = await in_order(stack)
    assert leader.process is not None
    async with under_load(stack) as requests:
        freeze(leader.process.pid)
        try:
            new = next(part for part in stack.conductors if part is not leader)

            async def leads() -> bool:
                asked = pb.WatchLeadershipRequest()
                answer = await ask_at(stack, new, "WatchLeadership", asked, pb.WatchLeadershipResponse)
                return bool(answer.leading)

            await until(leads, "the standby leads", every_s=0.1)
            await planned(requests, "scheduled by the standby")
        finally:
            leader.send(signal.SIGCONT)
        # Before it has asked the other one, and after that.
        for _ in range(20):
            with pytest.raises(errors.NotLeader):
                await ask_at(
                    stack,
                    leader,
                    "Schedule",
                    pb.ScheduleRequest(request_id="r", model=BOTH_MODEL, prompt_tokens=10),
                    pb.ScheduleResponse,
                )
        assert await in_order(stack) is new
        await planned(requests, "scheduled by the new leader")


async def test_a_killed_standby_is_missed_by_nobody(stack: Stack) -> None:
    leader = await in_order(stack)
    standby = next(part for part in stack.conductors if part is not leader)
    async with under_load(stack) as requests:
        begin = len(requests.served)
        standby.send(signal.SIGKILL)
        await planned(requests, "scheduled as before")

        async def missed() -> bool:
            return "unreachable" in (await roles(stack, leader)).values()

        await until(missed, "the leader says so", every_s=0.1)
        assert all(one.hit_share is not None for one in requests.served[begin:])
    standby.wait(5.0)
    standby.start()
    assert await in_order(stack) is leader


async def test_at_the_end_no_request_is_counted(stack: Stack) -> None:
    """Of all tests before. A plan whose answer was lost without a sign is closed by the gateway's next list of what is
    under way, within 81 s.
    """
    await until(lambda: nothing_is_counted(stack), "every request has ended", 200.0, every_s=0.2)
