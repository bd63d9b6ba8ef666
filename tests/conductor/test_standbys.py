"""Conductors with standbys over real gRPC: who leads, what a standby knows, what a new leader does with it."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from mooncache import errors
from mooncache.client.conductor_link import ConductorLink
from mooncache.conductor.background import lead
from mooncache.conductor.core.leadership import Standing
from mooncache.conductor.shell.replay import replay
from mooncache.proto.v1 import conductor_pb2 as pb
from mooncache.runtime.ports import hold_port, port_of
from tests.conditions import until
from tests.conductor.support import (
    CALM,
    PREFILL,
    Conductor,
    chain,
    config_at,
    instance,
    pair,
    running,
)

TAKEOVER_S = 1.0


class Cluster:
    """Some conductors that name each other, not all of which need to run."""

    def __init__(self, folder: Path, count: int, **overrides: Any) -> None:
        self._overrides = overrides
        self._held = [hold_port("127.0.0.1") for _ in range(count)]
        self.ports = [port_of(held) for held in self._held]
        self.target = ",".join(f"127.0.0.1:{port}" for port in self.ports)
        self._folder = folder
        self._stacks: dict[int, contextlib.AsyncExitStack] = {}
        self.running: dict[int, Conductor] = {}

    def config(self, at: int) -> Any:
        overrides = {
            **CALM,
            "conductor.port": self.ports[at],
            "conductor.takeover_s": TAKEOVER_S,
            "cluster.conductor_target": self.target,
            **self._overrides,
        }
        return config_at(self._folder, **overrides)

    async def start(self, *numbers: int) -> None:
        for at in numbers:
            stack = contextlib.AsyncExitStack()
            self.running[at] = await stack.enter_async_context(running(self.config(at)))
            self._stacks[at] = stack

    async def stop(self, at: int) -> None:
        del self.running[at]
        await self._stacks.pop(at).aclose()

    async def close(self) -> None:
        for at in list(self._stacks):
            await self.stop(at)
        for held in self._held:
            held.close()

    def standing(self, at: int) -> Standing:
        return self.running[at].service.state.leadership.standing

    def leader(self) -> int:
        """The one that leads, once all others follow it; -1 until then."""
        states = {at: one.service.state.leadership for at, one in self.running.items()}
        led = [at for at, book in states.items() if book.leads]
        if len(led) != 1 or any(
            book.standing is not Standing.STANDBY or book.term != states[led[0]].term
            for at, book in states.items()
            if at != led[0]
        ):
            return -1
        return led[0]

    async def agreed(self) -> int:
        await until(lambda: self.leader() >= 0, lambda: str({at: self.standing(at) for at in self.running}))
        return self.leader()

    async def caught_up(self) -> None:
        """Every standby has what the leader noted so far."""
        last = self.running[await self.agreed()].service.state.journal
        wanted = len(last)
        await until(
            lambda: all(len(one.service.state.journal) >= wanted for one in self.running.values()),
            "standbys know everything",
        )

    def link(self, at: int = 0) -> ConductorLink:
        return ConductorLink(self.target, self.running[at].service.token.text, self.config(0))


def with_conductors(folder: Path, count: int, scenario: Callable[[Cluster], Awaitable[None]]) -> None:
    async def run() -> None:
        cluster = Cluster(folder, count)
        try:
            await cluster.start(*range(count))
            await scenario(cluster)
        finally:
            await cluster.close()

    asyncio.run(run())


def legs(decode: str) -> Sequence[pb.LegReport]:
    return [pb.LegReport(role=pb.LEG_ROLE_DECODE, instance_id=decode, sent_ms=1.0, ended_ms=9.0, code="OK")]


def test_one_leads_and_the_line_finds_it_again_and_again(tmp_path: Path) -> None:
    async def scenario(c: Cluster) -> None:
        seen = []
        link = c.link()
        try:
            for _ in range(2):
                leader = await c.agreed()
                seen.append(leader)
                answer = await link.call(
                    "ListInstances", pb.ListInstancesRequest(), pb.ListInstancesResponse, 30
                )
                assert answer.term == link.term == c.running[leader].service.state.leadership.term
                assert link.target == f"127.0.0.1:{c.ports[leader]}"
                others = [at for at in c.running if at != leader]
                for at in others:
                    with pytest.raises(errors.NotLeader, match=f"{c.ports[leader]} leads"):
                        await c.running[at].schedule("r", chain("a", 4))
                await c.stop(leader)
            assert len(set(seen)) == 2
            await c.agreed()
        finally:
            await link.close()

    with_conductors(tmp_path, 3, scenario)


def test_a_standby_knows_what_the_leader_knows(tmp_path: Path) -> None:
    """Instances, their caches, roles and wishes, decisions under way and ended, and why."""
    keys = chain("a", 64)

    async def scenario(c: Cluster) -> None:
        first = await c.agreed()
        one = c.running[first]
        await one.register(*pair(), instance("p2", PREFILL))
        await one.report("p2", changes=pb.CacheChanges(stored=keys, sequence=1))
        await one.call("SetInstance", pb.SetInstanceRequest(instance_id="p", drain=True))
        ended = await one.schedule("ended", keys, gateway_id="g")
        assert (ended.prefill.instance_id, ended.local_hit_tokens) == ("p2", 64 * 16)
        await one.progress(ended.decision_id, pb.REQUEST_PHASE_FIRST_TOKEN, *legs("d"), elapsed_ms=20)
        await one.progress(
            ended.decision_id, pb.REQUEST_PHASE_FINISHED, *legs("d"), elapsed_ms=50, output_tokens=8
        )
        running_one = await one.schedule("open", chain("b", 2000), gateway_id="g")
        await until(lambda: not one.service.state._jobs, "explained")
        record = await one.record("ended")
        busy = one.service.state.core
        await c.caught_up()
        await c.stop(first)
        two = c.running[await c.agreed()]
        core = two.service.state.core
        assert {i.info.instance_id: str(i.state) for i in core.registry} == {
            "p": "draining",
            "d": "ready",
            "p2": "ready",
        }
        assert core.work.get(running_one.decision_id) is not None
        assert core.work.get(ended.decision_id) is None
        assert {name: core.assigned(i) for i in core.registry if (name := i.info.instance_id)} == {
            name: busy.assigned(i) for i in busy.registry if (name := i.info.instance_id)
        }
        assert len(core.in_flight) == len(busy.in_flight) == 1, "others wait for its blocks"
        again = await two.record("ended")
        moment = {
            "events",
            "spans",
            "observed",
        }  # reports carry the time since the decision, to the millisecond
        assert {k: v for k, v in again.items() if k not in moment} == {
            k: v for k, v in record.items() if k not in moment
        }
        assert again["prefill_candidates"]
        assert (await two.record("open"))["misses"]
        assert again["observed"]["output_tokens"] == record["observed"]["output_tokens"]
        assert [event["phase"] for event in again["events"]] == ["first_token", "finished"]
        waits = await two.schedule("waits", chain("c", 2010, parent="b", shared=2000), gateway_id="g")
        assert "branch=wait" in waits.summary, waits.summary
        hit = await two.schedule("hit", keys, gateway_id="g")
        assert (hit.prefill.instance_id, hit.local_hit_tokens) == ("p2", 64 * 16)
        wish = await two.report("p")
        assert wish.drain and wish.term == two.service.state.leadership.term
        delta = await two.report("p2", changes=pb.CacheChanges(removed=keys, sequence=2))
        assert not delta.want_full, "the worker's reports go on where the former leader was"

    with_conductors(tmp_path, 2, scenario)


def test_a_gateway_tells_a_new_leader_what_is_under_way_and_nothing_else_is_counted(tmp_path: Path) -> None:
    async def scenario(c: Cluster) -> None:
        first = await c.agreed()
        one = c.running[first]
        await one.register(*pair())
        known = await one.schedule("known", chain("a", 100), gateway_id="g:1")
        ended = await one.schedule("ended", chain("b", 100), gateway_id="g:1")
        other = await one.schedule("other", chain("c", 100), gateway_id="g:2")
        await c.caught_up()
        await c.stop(first)
        two = c.running[await c.agreed()]
        core = two.service.state.core
        # The former leader decided it in its last moment: only the gateway has heard of it.
        asked = pb.ScheduleRequest(
            request_id="late", tenant="t", model="m", prompt_tokens=1605, gateway_id="g:1", attempt=1
        )
        plan = pb.ScheduleResponse(decision_id="d-late", admitted=True, reason=pb.ADMISSION_REASON_ADMITTED)
        plan.CopyFrom(known)
        plan.decision_id = "d-late"
        late = pb.OpenRequest(request=asked, plan=plan, age_ms=500)
        late.reports.add(decision_id="d-late", phase=pb.REQUEST_PHASE_PREFILLED)
        me = pb.Gateway(gateway_id="g:1", url="http://g:1", software_version="1")
        part = await two.call("ResumeRequests", pb.ResumeRequestsRequest(gateway=me, requests=[late]))
        assert part.resumed_count == 1
        whole = pb.ResumeRequestsRequest(
            gateway=me, open_decision_ids=[known.decision_id, "d-late"], last=True
        )
        answer = await two.call("ResumeRequests", whole)
        assert (answer.resumed_count, answer.closed_count) == (0, 1)
        assert core.work.get(ended.decision_id) is None, "its end was told to the former leader alone"
        assert core.work.get("d-late") is not None
        assert (await two.record("late"))["chosen"]["decode"] == "d"
        assert (await two.call("ResumeRequests", whole)).closed_count == 0
        for name in (known.decision_id, "d-late"):
            await two.progress(name, pb.REQUEST_PHASE_FINISHED)
        assert core.work.get(other.decision_id) is not None
        two.service.state.leadership.began_s -= lead.RESUME_S + 1  # its gateway has not come for so long
        await until(lambda: core.work.get(other.decision_id) is None, "closed without its gateway")
        assert [core.assigned(i) for i in core.registry] == [0, 0]

    with_conductors(tmp_path, 2, scenario)


def test_a_standby_that_starts_later_knows_everything_too(tmp_path: Path) -> None:
    """Records of before it, and the whole caches: it has the workers asked for them."""
    keys = chain("a", 8)

    async def scenario(c: Cluster) -> None:
        first = await c.agreed()
        second = 1 - first
        await c.stop(second)
        one = c.running[first]
        await one.register(*pair())
        await one.report("p", changes=pb.CacheChanges(stored=keys, sequence=1))
        plan = await one.schedule("old", keys)
        await one.progress(plan.decision_id, pb.REQUEST_PHASE_FINISHED, *legs("d"))
        one.service.state.journal = type(one.service.state.journal)(
            entries_max=10
        )  # the report is gone by now
        late = await one.schedule("late", keys)
        await c.start(second)
        await c.agreed()
        await until(lambda: "p" in one.service.state.full_wanted, "asked for the whole cache")
        wish = await one.report("p")
        assert wish.want_full
        await one.report("p", changes=pb.CacheChanges(stored=keys, sequence=2, full=True))
        assert not (await one.report("p")).want_full
        two = c.running[second].service.state
        await until(lambda: sum(two.core.cache.blocks().values()) == 8, "the standby has the whole cache")
        await c.stop(first)
        now_leading = c.running[await c.agreed()]
        assert (await now_leading.schedule("new", keys)).local_hit_tokens == 8 * 16
        assert (await now_leading.record("late"))["decision_id"] == late.decision_id

    with_conductors(tmp_path, 2, scenario)


def test_a_leader_that_another_one_has_followed_is_not_obeyed(tmp_path: Path) -> None:
    """Two that lead: the older one serves nobody who knows the newer, and follows it."""

    async def scenario(c: Cluster) -> None:
        first = await c.agreed()
        one, other = c.running[first], c.running[1 - first]
        await one.register(*pair())
        await c.caught_up()
        other.service.state.begin_term()  # as if it could not reach the leader
        newer = other.service.state.leadership.term
        with pytest.raises(errors.NotLeader):
            await one.schedule("r", chain("a", 4), known_term=newer)
        link = c.link()
        try:
            asked = pb.ScheduleRequest(request_id="r", model="m", prompt_tokens=10)
            plan = await link.call("Schedule", asked, pb.ScheduleResponse, 30)
        finally:
            await link.close()
        assert plan.admitted
        assert plan.term >= newer
        leader = await c.agreed()
        assert c.running[leader].service.state.leadership.term >= newer

    with_conductors(tmp_path, 2, scenario)


def test_what_makes_no_sense_is_passed_over(tmp_path: Path) -> None:
    async def scenario(c: Cluster) -> None:
        state = c.running[await c.agreed()].service.state
        nonsense = [
            pb.JournalEntry(),
            pb.JournalEntry(decided=pb.DecidedRequest(branch="sideways")),
            pb.JournalEntry(registered=pb.RegisterInstanceRequest()),
            pb.JournalEntry(reported=pb.ReportInstanceRequest(instance_id="nobody")),
            pb.JournalEntry(progress=pb.ReportProgressRequest(decision_id="none", phase=4)),
            pb.JournalEntry(wish=pb.InstanceWish()),
            pb.JournalEntry(copied=pb.CopiedPrefix(keys=b"short")),
            pb.JournalEntry(explained=pb.ExplainedDecision(decision_id="none")),
            pb.JournalEntry(gateway=pb.Gateway()),
            pb.JournalEntry(lost_decision_id="none"),
            pb.JournalEntry(named=pb.ResumeRequestsRequest(gateway_run=1, open_decision_ids=["none"])),
        ]
        for entry in nonsense:
            replay(state, entry, state.clock.now_s())
        state.check()
        assert not len(state.core.registry)
        assert not len(state.core.work)

    with_conductors(tmp_path, 1 + 1, scenario)


def test_a_standby_that_misses_an_instance_asks_for_all_of_them(tmp_path: Path) -> None:
    """Whatever made it forget one: reports of what it does not know make it begin anew."""

    async def scenario(c: Cluster) -> None:
        first = await c.agreed()
        one, other = c.running[first], c.running[1 - first]
        await one.register(*pair())
        core = other.service.state.core
        await until(lambda: len(core.registry) == 2, "both are known")
        for instance_of in core.registry:
            instance_of.gone_at_s = 0.0
        await until(lambda: not len(core.registry), "forgotten")
        await one.report("p")
        await until(lambda: len(core.registry) == 2, "known again")

    with_conductors(tmp_path, 2, scenario)


def test_a_leader_that_hears_of_a_newer_term_looks_for_its_leader_first(tmp_path: Path) -> None:
    async def scenario(c: Cluster) -> None:
        first = await c.agreed()
        one = c.running[first]
        await one.register(*pair())
        newer = one.service.state.leadership.term + 1000
        with pytest.raises(errors.NotLeader):
            await one.schedule("r", chain("a", 4), known_term=newer)
        leader = c.running[await c.agreed()]
        await until(lambda: leader.service.state.leadership.term > newer, "a term that passes it")
        assert len(leader.service.state.core.registry) == 2

    with_conductors(tmp_path, 2, scenario)
