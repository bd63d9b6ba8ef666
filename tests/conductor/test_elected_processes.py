"""Elected conductors as processes under load: killed, stopped, without who elects. Requests go on."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from typing import Any

import pytest

from mooncache import errors
from mooncache.bench.gateway.stack import BOTH_MODEL, Stack, start_stack
from mooncache.bench.survival.conductor import FAMILIES
from mooncache.proto.v1 import conductor_pb2 as pb
from tests.conditions import until
from tests.conductor.test_standby_processes import BUSY, ask_at, in_order, planned, under_load
from tests.coordination.backends import Backend
from tests.coordination.conftest import EtcdServer
from tests.coordination.kubernetes_api import KubernetesApi, running_api
from tests.processes import freeze

pytestmark = pytest.mark.timeout(400)


def elected(backend: Backend) -> Iterator[Stack]:
    """Two conductors, a gateway, a pool, engines that answer at once."""
    settings = BUSY | backend.env(3, "conductor.election")
    with pytest.MonkeyPatch.context() as patch:
        for name, value in settings.items():
            patch.setenv(name, value)
        with start_stack(conductors=2, families=FAMILIES) as found:
            for part in found.conductors:
                part.env.update(settings)  # each test has an environment of its own, and starts them again
            yield found


@pytest.fixture(scope="module")
def api(tmp_path_factory: pytest.TempPathFactory) -> Iterator[KubernetesApi]:
    with running_api(tmp_path_factory.mktemp("lease") / "kubernetes") as found:
        yield found


@pytest.fixture(scope="module")
def stack(api: KubernetesApi) -> Iterator[Stack]:
    yield from elected(Backend("lease", api))


async def in_charge(stack: Stack) -> Any:
    """The leader, once the other one follows it."""
    found: list[Any] = []

    async def settled() -> bool:
        try:
            found.append(await in_order(stack))
        except errors.MooncacheError:  # a busy machine is late
            return False
        return True

    await until(settled, "a leader and a standby", every_s=0.2)
    return found[0]


async def leads(stack: Stack, part: Any) -> bool:
    try:
        answer = await ask_at(
            stack, part, "WatchLeadership", pb.WatchLeadershipRequest(), pb.WatchLeadershipResponse
        )
    except errors.MooncacheError:
        return False
    return bool(answer.leading)


async def refuses(stack: Stack, part: Any) -> bool:
    request = pb.ScheduleRequest(request_id="r", model=BOTH_MODEL, prompt_tokens=10)
    try:
        await ask_at(stack, part, "Schedule", request, pb.ScheduleResponse)
    except errors.NotLeader:
        return True
    return False


async def test_a_killed_leader_costs_no_request(stack: Stack, api: KubernetesApi) -> None:
    leader = await in_charge(stack)
    holder = api.lease("mooncache-conductors")["spec"]["holderIdentity"]
    async with under_load(stack) as requests:
        leader.send(signal.SIGKILL)
        await planned(requests, "scheduled by the standby")
        begin_s = requests.served[-1].begun_s
        await planned(requests, "more of them")
        assert requests.hit_share(begin_s, float("inf")) > 0.9, "the new leader knows the caches"
    assert api.lease("mooncache-conductors")["spec"]["holderIdentity"] != holder
    leader.wait(5.0)
    leader.start()
    assert await in_charge(stack) is not leader


async def test_a_stopped_leader_is_replaced_and_refuses_when_it_goes_on(stack: Stack) -> None:
    leader = await in_charge(stack)
    assert leader.process is not None
    new = next(part for part in stack.conductors if part is not leader)
    async with under_load(stack) as requests:
        freeze(leader.process.pid)
        try:
            await until(lambda: leads(stack, new), "the standby leads", every_s=0.1)
            await planned(requests, "scheduled by the standby")
        finally:
            leader.send(signal.SIGCONT)
        for _ in range(20):
            assert await refuses(stack, leader)
        assert await in_charge(stack) is new


async def test_requests_go_on_without_the_api_server_and_are_planned_when_it_is_back(
    stack: Stack, api: KubernetesApi
) -> None:
    await in_charge(stack)
    async with under_load(stack) as requests:
        api.stop()
        for part in stack.conductors:
            await until(lambda part=part: refuses(stack, part), "no conductor leads", every_s=0.1)  # type: ignore[misc]
        served = len(requests.served)
        await until(lambda: len(requests.served) > served + 20, "requests go round robin")
        assert requests.served[-1].hit_share is None
        api.start()
        await planned(requests, "scheduled again")
    await in_charge(stack)


@pytest.fixture
def stack_by_etcd(etcd: EtcdServer) -> Iterator[Stack]:
    yield from elected(Backend("etcd", etcd))


@pytest.mark.etcd
async def test_the_same_by_etcd(stack_by_etcd: Stack) -> None:
    stack = stack_by_etcd
    leader = await in_charge(stack)
    other = next(part for part in stack.conductors if part is not leader)
    async with under_load(stack) as requests:
        leader.send(signal.SIGKILL)
        await planned(requests, "scheduled by the standby")
    assert await leads(stack, other)
