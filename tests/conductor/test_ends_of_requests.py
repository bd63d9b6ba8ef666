"""Word of a request's end comes late, twice, out of order or for a request that is not known: each is counted once."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from mooncache import errors
from mooncache.conductor.core.adoption import CarriedDecisions
from mooncache.conductor.core.decisions import Decision, PoolAnswer, SchedulingRequest
from mooncache.conductor.core.progress import Phase, ProgressReport
from mooncache.conductor.core.records import DecisionState, Records
from mooncache.conductor.core.registry import InstanceInfo, InstanceState
from mooncache.conductor.core.scheduler import Scheduler
from mooncache.conductor.ops import resume_requests
from mooncache.conductor.state import native_index
from mooncache.kvcache.instance_role import InstanceRole
from mooncache.proto.v1 import conductor_pb2 as pb
from tests.conductor.support import Conductor, chain, pair, scheduler_settings, serve
from tests.conductor.test_standbys import Cluster, with_conductors

FINISHED = pb.REQUEST_PHASE_FINISHED
ME = pb.Gateway(gateway_id="g:1", url="http://g:1", software_version="1")
RUN = 77


def scheduler() -> Scheduler:
    core = Scheduler(scheduler_settings(), random.Random(1), native_index)
    for name in ("a", "b"):
        info = InstanceInfo(
            name, 1, InstanceRole.BOTH, model="m", max_model_tokens=10_000, kv_capacity_tokens=100_000
        )
        core.register(info, InstanceState.READY, 0.0)
    return core


def decide(core: Scheduler, name: str, now_s: float) -> Decision:
    return core.schedule(SchedulingRequest(name, "m", 100, "t"), PoolAnswer(), now_s, now_s)


def counted(core: Scheduler) -> int:
    return sum(core.assigned(instance) for instance in core.registry)


REPORTS = [
    ProgressReport(Phase.PREFILLED, sequence=1),
    ProgressReport(Phase.FIRST_TOKEN, sequence=2),
    ProgressReport(Phase.FINISHED, output_tokens=5, sequence=3),
]


@pytest.mark.parametrize("seed", range(30))
def test_repeats_in_any_order_end_no_other_request_and_take_nothing_off_twice(seed: int) -> None:
    """Requests share an id, as clients may let them: their decisions are what reports name."""
    rng, core = random.Random(seed), scheduler()
    open_ids, sent = [], []
    for step in range(60):
        now_s = 0.1 * step
        if rng.random() < 0.4 or not sent:
            decision = decide(core, rng.choice(["same", f"r{step}"]), now_s)
            open_ids.append(decision.decision_id)
            sent += [(decision.decision_id, report) for report in REPORTS]
        name, report = rng.choice(sent)  # as late, as often and in whatever order
        core.report_progress(name, report, now_s - rng.choice([0.0, 0.0, 3.0]))
        if report.phase is Phase.FINISHED and name in open_ids:
            open_ids.remove(name)
        core.check()
        assert {each for each in open_ids if core.work.get(each)} == set(open_ids)
        assert len(core.work) == len(open_ids)
    for name, report in sent:
        core.report_progress(name, report, 7.0)
    core.check()
    assert len(core.work) == counted(core) == 0


def test_a_repeat_is_noted_once_and_teaches_once() -> None:
    core = scheduler()
    decision = decide(core, "r", 1.0)
    for report in [*REPORTS, *REPORTS, REPORTS[0]]:
        core.report_progress(decision.decision_id, report, 2.0)
    record = core.records.find("r")
    assert record is not None and len(record.events) == 3
    assert record.state is DecisionState.FINISHED


def test_a_report_that_has_waited_is_taken_in_as_of_when_it_was_made(tmp_path: Path) -> None:
    async def scenario(c: Conductor) -> None:
        await c.register(*pair())
        plan = await c.schedule("r", chain("a", 100))
        core = c.service.state.core
        active = core.work.get(plan.decision_id)
        assert active is not None
        active.assigned_s -= 60.0
        record = core.records.find("r")
        assert record is not None
        record.made_s -= 60.0
        await c.progress(plan.decision_id, FINISHED, code="OK", sequence=4, waited_ms=58_000)
        event = (await c.record("r"))["events"][-1]
        assert 1900 < event["since_decision_ms"] < 30_000
        other = await c.schedule("s", chain("a", 100))
        await c.progress(other.decision_id, FINISHED, sequence=5, waited_ms=1 << 62)
        assert (await c.record("s"))["events"][-1]["since_decision_ms"] == 0.0, "not before it was decided"

    serve(tmp_path, scenario)


def open_request(plan: pb.ScheduleResponse, name: str) -> pb.OpenRequest:
    asked = pb.ScheduleRequest(
        request_id=name,
        tenant="t",
        model="m",
        prompt_tokens=1605,
        gateway_id="g:1",
        gateway_run=RUN,
        attempt=1,
    )
    made = pb.ScheduleResponse()
    made.CopyFrom(plan)
    made.decision_id = f"d-{name}"
    return pb.OpenRequest(request=asked, plan=made, age_ms=500)


def test_a_list_that_its_requests_ends_have_overtaken_adopts_none_of_them(tmp_path: Path) -> None:
    async def scenario(c: Conductor) -> None:
        await c.register(*pair())
        plan = await c.schedule("known", chain("a", 100))
        with pytest.raises(errors.DecisionUnknown):
            await c.progress("d-over", FINISHED, sequence=9)
        late = [open_request(plan, "over"), open_request(plan, "open")]
        answer = await c.call("ResumeRequests", pb.ResumeRequestsRequest(gateway=ME, requests=late))
        assert answer.resumed_count == 1
        work = c.service.state.core.work
        assert work.get("d-over") is None and work.get("d-open") is not None

    serve(tmp_path, scenario)


async def name_open(c: Conductor, *decision_ids: str, run: int = RUN) -> int:
    whole = pb.ResumeRequestsRequest(gateway=ME, open_decision_ids=decision_ids, last=True, gateway_run=run)
    closed: int = (await c.call("ResumeRequests", whole)).closed_count
    return closed


def test_a_plan_that_never_arrived_is_closed_once_it_is_old(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario(c: Conductor) -> None:
        await c.register(*pair())
        asked: dict[str, Any] = {"gateway_id": "g:1"}
        lost = await c.schedule("lost", chain("a", 100), gateway_run=RUN, **asked)
        known = await c.schedule("known", chain("b", 100), gateway_run=RUN, **asked)
        other = await c.schedule("other", chain("c", 100), gateway_run=RUN + 1, **asked)
        silent = await c.schedule("silent", chain("d", 100), **asked)
        assert await name_open(c, known.decision_id) == 0, "its answer may be on its way"
        monkeypatch.setattr(resume_requests, "UNNAMED_AFTER_S", 0.0)
        assert await name_open(c, known.decision_id, run=0) == 0, "an older gateway names no process"
        assert await name_open(c, known.decision_id) == 1
        core = c.service.state.core
        assert core.work.get(lost.decision_id) is None
        assert (await c.record("lost"))["state"] == "lost"
        for plan in (known, other, silent):
            assert core.work.get(plan.decision_id) is not None
            await c.progress(plan.decision_id, FINISHED)
        await c.progress(lost.decision_id, FINISHED)
        assert counted(core) == 0

    serve(tmp_path, scenario)


def test_a_standby_hears_of_ends_that_its_leader_never_knew(tmp_path: Path) -> None:
    """It led before, and decided what it could not pass on any more."""

    async def scenario(c: Cluster) -> None:
        first = await c.agreed()
        leader, standby = c.running[first], c.running[1 - first]
        await leader.register(*pair())
        plan = await leader.schedule("r", chain("a", 10))
        await c.caught_up()
        assert standby.service.state.core.work.get(plan.decision_id) is not None
        core = leader.service.state.core
        core.close(plan.decision_id, DecisionState.LOST, 0.0)
        core.records = core.outcomes.records = Records(10)  # as if it had never heard of it
        with pytest.raises(errors.DecisionUnknown):
            await leader.progress(plan.decision_id, FINISHED, sequence=1)
        await c.caught_up()
        assert standby.service.state.core.work.get(plan.decision_id) is None

    with_conductors(tmp_path, 2, scenario)


def test_a_standby_forgets_what_its_new_leader_never_knew(tmp_path: Path) -> None:
    """The former leader took in the end, and died before the standby heard of it: no report comes again."""

    async def scenario(c: Cluster) -> None:
        first = await c.agreed()
        leader, standby = c.running[first].service.state, c.running[1 - first].service.state
        await c.running[first].register(*pair())
        asked: dict[str, Any] = {"gateway_id": "g:1", "gateway_run": RUN}
        ended = await c.running[first].schedule("ended", chain("a", 10), **asked)
        under_way = await c.running[first].schedule("under way", chain("b", 10), **asked)
        await c.caught_up()
        leader.core.close(ended.decision_id, DecisionState.FINISHED, 0.0)  # the standby does not hear of it
        leader.begin_term()
        young = await c.running[first].schedule("young", chain("c", 10), **asked)  # its answer is on its way
        named = pb.ResumeRequestsRequest(
            gateway=ME,
            known_term=leader.leadership.term,
            open_decision_ids=[under_way.decision_id],
            last=True,
            gateway_run=RUN,
        )
        for _ in range(2):
            await c.running[first].call("ResumeRequests", named)
            await c.caught_up()
        known = set(standby.core.work.gateway_runs())
        assert known == set(leader.core.work.gateway_runs()) == {under_way.decision_id, young.decision_id}
        assert sum(each.entry.HasField("named") for each in leader.journal._young) == 1, "once in a term"

    with_conductors(tmp_path, 2, scenario)


def test_a_list_closes_only_what_its_gateway_has_from_before_the_term() -> None:
    carried = CarriedDecisions()
    carried.begin(7, {"ended": RUN, "named": RUN, "known there": RUN, "of another": RUN + 1, "of none": 0})
    carried.begin(7, {"of this term": RUN})  # the same leader is followed again
    carried.known_there("known there")
    assert carried.unnamed(6, RUN, frozenset()) == [], "a list of an older term"
    assert carried.unnamed(7, 0, frozenset()) == [], "an older gateway names no process"
    assert carried.unnamed(7, RUN, frozenset({"named"})) == ["ended"]
    assert carried.unnamed(8, RUN, frozenset()) == [], "once"
    assert len(carried) == 2
