"""Conductors that do not hear each other, over real gRPC: cut apart and together again, and never introduced."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import pytest

from mooncache import errors
from mooncache.client.conductor_link import ConductorLink
from mooncache.conductor.core.leadership import Standing
from mooncache.proto.v1 import conductor_pb2 as pb
from tests.conditions import until
from tests.conductor.support import CALM, Conductor, chain, config_at, instance, pair, running
from tests.conductor.test_standbys import Cluster
from tests.relay import Relay, relay_to


class Parted(Cluster):
    """Two conductors that reach each other through relays; others reach them as they are."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, 2)
        self.relays: list[Relay] = []  # relays[n] leads to conductor n

    def config(self, at: int) -> Any:
        self.target = ",".join(
            f"127.0.0.1:{port}" if place == at else self.relays[place].target
            for place, port in enumerate(self.ports)
        )
        return super().config(at)

    def leading(self) -> list[int]:
        return [at for at, one in self.running.items() if one.service.state.leads]

    def term(self, at: int) -> int:
        return self.running[at].service.state.leadership.term

    def link_to(self, *numbers: int) -> ConductorLink:
        """A gateway's line, from where only these conductors are reached."""
        target = ",".join(f"127.0.0.1:{self.ports[at]}" for at in numbers)
        return ConductorLink(target, self.running[0].service.token.text, self.config(0))


@contextlib.asynccontextmanager
async def two(folder: Path) -> Any:
    cluster = Parted(folder)
    async with contextlib.AsyncExitStack() as stack:
        for port in cluster.ports:
            cluster.relays.append(await stack.enter_async_context(relay_to(f"127.0.0.1:{port}")))
        try:
            await cluster.start(0, 1)
            yield cluster
        finally:
            await cluster.close()


def names(conductor: Conductor) -> set[str]:
    return {one.info.instance_id for one in conductor.service.state.core.registry}


async def granted(conductor: Conductor, gateway_id: str) -> float:
    """What a gateway gets of a tenant's limit of 8 requests under way, once the conductor knows its gateways."""
    gateway = pb.Gateway(gateway_id=gateway_id, url=f"http://{gateway_id}", software_version="1")
    await conductor.call("ListInstances", pb.ListInstancesRequest(gateway=gateway))
    sequence, held = 0, 0.0

    async def whole() -> bool:
        nonlocal sequence, held
        sequence += 1
        use = pb.LimitUse(tenant="t", kind=pb.LIMIT_KIND_CONCURRENCY, limit=8, slice=held, wanted=8)
        asked = pb.LeaseLimitsRequest(
            gateway_id=gateway_id, gateway_run=1, sequence=sequence, uses=[use], whole=True
        )
        held = float((await conductor.call("LeaseLimits", asked)).leases[0].slice)
        return held >= 8.0

    await until(whole, "the whole limit", every_s=0.1)
    return held


async def test_cut_apart_each_leads_for_who_reaches_it_and_then_the_older_term_yields(tmp_path: Path) -> None:
    async with two(tmp_path) as c:
        older = await c.agreed()
        newer = 1 - older
        await c.running[older].register(*pair())
        await c.caught_up()
        for relay in c.relays:
            relay.cut()
        await until(lambda: len(c.leading()) == 2, lambda: str({at: c.standing(at) for at in c.running}))
        assert c.term(newer) > c.term(older)
        before = await c.running[older].schedule("old-side", chain("a", 100), gateway_id="g:old")
        other = await c.running[newer].schedule("new-side", chain("b", 100), gateway_id="g:new")
        for plan in (before, other):
            assert plan.admitted
            assert plan.decode.instance_id == "d", "the standby knew the instances"
        await c.running[newer].register(instance("of-the-new-side"))
        for relay in c.relays:
            relay.heal()
        assert await c.agreed() == newer
        with pytest.raises(errors.NotLeader):
            await c.running[older].schedule("r", chain("a", 4))
        await c.caught_up()
        assert names(c.running[older]) == names(c.running[newer]) == {"p", "d", "of-the-new-side"}

        # The gateway of the older side tells the newer leader what it has under way, and it is counted there.
        work = c.running[newer].service.state.core.work
        assert work.get(before.decision_id) is None
        asked = pb.ScheduleRequest(
            request_id="old-side", tenant="t", model="m", prompt_tokens=1605, gateway_id="g:old", attempt=1
        )
        me = pb.Gateway(gateway_id="g:old", url="http://g:old", software_version="1")
        resumed = await c.running[newer].call(
            "ResumeRequests",
            pb.ResumeRequestsRequest(
                gateway=me, requests=[pb.OpenRequest(request=asked, plan=before, age_ms=500)]
            ),
        )
        assert resumed.resumed_count == 1
        assert work.get(before.decision_id) is not None
        assert work.get(other.decision_id) is not None, "what the newer side had decided stays"
        for plan in (before, other):
            await c.running[newer].progress(plan.decision_id, pb.REQUEST_PHASE_FINISHED)
        core = c.running[newer].service.state.core
        assert [core.assigned(one) for one in core.registry] == [0, 0, 0]


async def test_a_gateway_that_reaches_both_sides_of_a_cut_is_served_all_the_time(tmp_path: Path) -> None:
    async with two(tmp_path) as c:
        await c.running[await c.agreed()].register(*pair())
        await c.caught_up()
        link = c.link_to(0, 1)
        try:
            for relay in c.relays:
                relay.cut()
            terms = []
            for number in range(300):
                asked = pb.ScheduleRequest(request_id=f"r{number}", model="m", prompt_tokens=10)
                plan = await link.call("Schedule", asked, pb.ScheduleResponse, 30)
                assert plan.admitted
                terms.append(plan.term)
                if len(c.leading()) == 2 and terms[-1] > terms[0]:
                    break
                await c.running[0].service.state.clock.sleep(0.1)
            assert terms[-1] > terms[0], "both sides had a leader, and the newer one was followed"
            assert terms == sorted(terms), "an older term is never believed"
            for relay in c.relays:
                relay.heal()
            assert c.term(await c.agreed()) >= terms[-1]
        finally:
            await link.close()


async def test_conductors_that_do_not_name_each_other_serve_their_own_workers(tmp_path: Path) -> None:
    """They do not know of each other: nothing fails, and each gateway has what its own conductor has."""
    async with contextlib.AsyncExitStack() as stack:
        found = [
            await stack.enter_async_context(running(config_at(tmp_path, **CALM, **{"conductor.port": 0})))
            for _ in range(2)
        ]
        keys = chain("shared", 64)
        for number, one in enumerate(found):
            assert one.service.state.leadership.standing is Standing.LEADER
            await one.register(instance(f"engine-{number}"))
            await one.report(f"engine-{number}", changes=pb.CacheChanges(stored=keys, sequence=1))
        limits = []
        for number, one in enumerate(found):
            assert names(one) == {f"engine-{number}"}
            plan = await one.schedule("r", keys, gateway_id=f"g:{number}")
            assert (plan.admitted, plan.decode.instance_id) == (True, f"engine-{number}")
            limits.append(await granted(one, f"g:{number}"))
        assert limits == [8.0] * 2, "each gives the whole limit: a tenant has it twice"
