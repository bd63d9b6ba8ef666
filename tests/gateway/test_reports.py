"""Reports of requests reach the conductor that leads, whatever happens to the calls that carry them."""

from __future__ import annotations

import asyncio
import io
import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from mooncache.errors import (
    ConductorUnavailable,
    DecisionUnknown,
    Internal,
    InvalidArgument,
    LimitExceeded,
    MooncacheError,
)
from mooncache.gateway.background import close_lost_plans
from mooncache.gateway.core import report_queue
from mooncache.gateway.core.fleet import FleetView
from mooncache.gateway.metrics import GatewayMetrics
from mooncache.gateway.shell import conductor, report_lanes
from mooncache.proto.v1 import conductor_pb2 as pb
from mooncache.runtime import logs
from mooncache.runtime.clock import LoopClock
from mooncache.runtime.metrics import Metrics
from mooncache.runtime.rpc import CallContext
from mooncache.testing import virtual_time
from tests.conditions import until
from tests.gateway import stand_in
from tests.gateway.stand_in import Bench, FakeEngine, running
from tests.gateway.test_requests import CHAT, ask


class Ears:
    """What the stand-in conductor does with the calls that report."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.calls: list[pb.ReportProgressRequest] = []
        self.named: list[pb.ResumeRequestsRequest] = []
        self.error: MooncacheError | None = None
        self.silent = False
        self._update = stand_in._update
        monkeypatch.setattr(stand_in, "_update", self.update)
        monkeypatch.setattr(stand_in, "_refuse", self.resume)

    async def update(self, state: Any, request: pb.ReportProgressRequest, context: CallContext) -> Any:
        self.calls.append(request)
        if self.silent:
            await asyncio.Event().wait()
        if self.error is not None:
            raise self.error
        return await self._update(state, request, context)

    async def resume(self, _state: Any, request: Any, _context: CallContext) -> Any:
        if not isinstance(request, pb.ResumeRequestsRequest):
            raise InvalidArgument("the stand-in does not do this")
        self.named.append(request)
        return pb.ResumeRequestsResponse()


@pytest.fixture
def ears(monkeypatch: pytest.MonkeyPatch) -> Ears:
    return Ears(monkeypatch)


def metric(bench: Bench, name: str) -> float:
    lines = bench.gateway.metrics.render().decode().splitlines()
    return next(float(line.split()[1]) for line in lines if line.startswith(f"mooncache_gateway_{name} "))


async def all_acknowledged(bench: Bench) -> None:
    await until(lambda: not len(bench.gateway.state.conductor._reports), "all reports are acknowledged")


@pytest.mark.parametrize("trouble", ["error", "silence"])
async def test_the_end_of_a_request_is_sent_until_it_is_heard(
    tmp_path: Path, http: aiohttp.ClientSession, monkeypatch: pytest.MonkeyPatch, ears: Ears, trouble: str
) -> None:
    monkeypatch.setattr(report_lanes, "REPORT_TIMEOUT_S", 0.3)
    monkeypatch.setattr(report_queue, "AGAIN_MAX_S", 0.2)
    async with running(tmp_path, [FakeEngine("e")]) as bench:
        ears.error = LimitExceeded("too many calls") if trouble == "error" else None
        ears.silent = trouble == "silence"
        assert (await ask(bench, http, CHAT))[0] == 200
        await until(lambda: metric(bench, "updates_resent_total") >= 3, "it was tried again")
        assert not bench.conductor.updates and metric(bench, "updates_waiting") > 0
        ears.error, ears.silent = None, False
        await bench.conductor.wait_for_phase("FINISHED")
        await all_acknowledged(bench)
        assert metric(bench, "updates_dropped_total") == metric(bench, "updates_waiting") == 0
        ends = [one for one in bench.conductor.updates if one.phase == pb.REQUEST_PHASE_FINISHED]
        assert len({one.sequence for one in ends}) == 1, "a repeat has the same number"
        assert all(one.waited_ms > 0 for one in ends), "and says how long it has waited"


async def test_reports_of_a_request_keep_their_order(
    tmp_path: Path, http: aiohttp.ClientSession, monkeypatch: pytest.MonkeyPatch, ears: Ears
) -> None:
    monkeypatch.setattr(report_queue, "AGAIN_MAX_S", 0.1)
    async with running(tmp_path, [FakeEngine("e")]) as bench:
        ears.error = LimitExceeded("too many calls")
        assert (await ask(bench, http, CHAT))[0] == 200
        await until(lambda: metric(bench, "updates_resent_total") >= 3, "it was tried again")
        ears.error = None
        await bench.conductor.wait_for_phase("FINISHED")
        numbers = [one.sequence for one in bench.conductor.updates]
        assert numbers == sorted(numbers) and bench.conductor.phases()[-1] == "FINISHED"


async def test_a_conductor_that_does_not_know_a_request_has_heard(
    tmp_path: Path, http: aiohttp.ClientSession, ears: Ears
) -> None:
    """It was started again, and counts nothing of what the former process knew."""
    async with running(tmp_path, [FakeEngine("e")]) as bench:
        ears.error = DecisionUnknown("who?")
        assert (await ask(bench, http, CHAT))[0] == 200
        await until(lambda: ears.calls, "it is told")
        await all_acknowledged(bench)
        assert metric(bench, "updates_resent_total") == metric(bench, "updates_dropped_total") == 0


async def test_a_report_that_breaks_the_conductor_is_dropped_and_said_once(
    tmp_path: Path, http: aiohttp.ClientSession, ears: Ears
) -> None:
    stream = io.StringIO()
    logs.setup("gateway", log_format="json", stream=stream)
    try:
        async with running(tmp_path, [FakeEngine("e")]) as bench:
            ears.error = Internal("a defect")
            for _ in range(3):
                assert (await ask(bench, http, CHAT))[0] == 200
            await all_acknowledged(bench)
            assert metric(bench, "updates_dropped_total") >= 3
            ears.error = None
            assert (await ask(bench, http, CHAT))[0] == 200
            await bench.conductor.wait_for_phase("FINISHED")
    finally:
        logs.reset()
    assert "gateway.reports_dropped" in stream.getvalue()


async def test_a_plan_that_never_arrived_is_closed_by_the_list_of_requests_under_way(
    tmp_path: Path, http: aiohttp.ClientSession, monkeypatch: pytest.MonkeyPatch, ears: Ears
) -> None:
    monkeypatch.setattr(conductor, "_SCHEDULE_TIMEOUT_S", 0.2)
    monkeypatch.setattr(conductor, "_LATE_PLAN_S", 0.3)
    monkeypatch.setattr(close_lost_plans, "SETTLED_S", 0.1)
    async with running(tmp_path, [FakeEngine("e")]) as bench:

        async def hangs(_request: pb.ScheduleRequest) -> pb.ScheduleResponse:
            await asyncio.Event().wait()
            raise AssertionError

        bench.conductor.think = hangs
        assert (await ask(bench, http, CHAT))[2]["x-mooncache-decision"] == "unscheduled"
        await until(lambda: ears.named, "the conductor hears what is under way")
        (named,) = ears.named
        assert named.last and list(named.open_decision_ids) == []
        assert named.gateway_run == bench.conductor.scheduled[-1].gateway_run != 0
        assert named.gateway.gateway_id == bench.gateway.state.gateway_id


async def test_a_plan_that_the_gateways_own_choice_replaces_is_given_back(
    tmp_path: Path, http: aiohttp.ClientSession, monkeypatch: pytest.MonkeyPatch, ears: Ears
) -> None:
    """The conductor made it, does not answer when its engine fails, and would count it on."""
    monkeypatch.setattr(conductor, "_SCHEDULE_TIMEOUT_S", 0.2)

    async def broken(_engine: FakeEngine, request: web.Request, _body: dict[str, Any]) -> web.StreamResponse:
        assert request.transport is not None
        request.transport.abort()
        raise ConnectionResetError

    async with running(tmp_path, [FakeEngine("bad", behave=broken), FakeEngine("good")]) as bench:
        first = bench.plan("bad")
        hangs = asyncio.Event()

        async def once(_request: pb.ScheduleRequest) -> pb.ScheduleResponse:
            if len(bench.conductor.scheduled) > 1:
                await hangs.wait()
            return first

        bench.conductor.think = once
        assert (await ask(bench, http, CHAT))[0] == 200
        await bench.conductor.wait_for_phase("ABORTED")
        (end,) = [one for one in ears.calls if one.phase == pb.REQUEST_PHASE_ABORTED]
        assert (end.decision_id, end.code) == (first.decision_id, "REPLACED")
        hangs.set()


def test_what_goes_well_is_reported_in_one_call_and_what_fails_at_once() -> None:
    """A call costs many times a report, and no decision waits for word of what goes well."""
    first, finished, failed = (
        pb.REQUEST_PHASE_FIRST_TOKEN,
        pb.REQUEST_PHASE_FINISHED,
        pb.REQUEST_PHASE_FAILED,
    )
    calls: list[tuple[float, list[pb.RequestPhase]]] = []

    async def scenario() -> None:
        clock = LoopClock()
        started_s, linger_s = clock.now_s(), report_queue.LINGER_S

        async def call(_method: str, request: pb.ReportProgressRequest, *_: object) -> object:
            phases = [request.phase, *(one.phase for one in request.more)]
            calls.append((round(clock.now_s() - started_s, 6), phases))
            return pb.ReportProgressResponse()

        async def resume(_term: int) -> None:
            pass

        stats = GatewayMetrics(Metrics("gateway"))
        lanes = report_lanes.ReportLanes(
            SimpleNamespace(call=call, term=1),  # type: ignore[arg-type]
            clock,
            stats,
            random.Random(1),
            resume,
        )
        duties = [asyncio.create_task(lanes.run(lane)) for lane in range(report_lanes.LANES)]
        for end in (finished, failed):
            for phase in (first, end):
                lanes.add("request", pb.ReportProgressRequest(decision_id="decision", phase=phase))
                await clock.sleep(linger_s / 2)
            await clock.sleep(1 - linger_s)
        lanes.add("batch", pb.ReportProgressRequest(decision_id="offline", phase=first), at_once=True)
        await clock.sleep(1)
        assert not len(lanes)
        for duty in duties:
            duty.cancel()

    virtual_time.run(scenario(), 1)
    linger_s = report_queue.LINGER_S
    assert calls == [(linger_s, [first, finished]), (1 + linger_s / 2, [first, failed]), (2, [first])]


def test_a_question_without_an_answer_before_a_list_has_a_list_of_its_own() -> None:
    """The conductor closes no plan that young, so the list that was due already does not help."""
    named_s: list[float] = []

    async def scenario() -> None:
        clock = LoopClock()

        async def call(method: str, *_: object) -> object:
            if method == "ResumeRequests":
                named_s.append(clock.now_s())
                return pb.ResumeRequestsResponse()
            raise ConductorUnavailable("Nothing listens.")

        metrics, fleet, link = GatewayMetrics(Metrics("gateway")), FleetView(), SimpleNamespace(several=False)
        link.call = call
        asked = conductor.Conductor(link, clock, metrics, fleet, random.Random(1))  # type: ignore[arg-type]
        state = SimpleNamespace(conductor=asked, clock=clock, gateway=pb.Gateway)
        duty = asyncio.create_task(close_lost_plans.run(state))  # type: ignore[arg-type]
        await asked.schedule(pb.ScheduleRequest())
        await clock.sleep(close_lost_plans.SETTLED_S - 1)
        await asked.schedule(pb.ScheduleRequest())
        await clock.sleep(close_lost_plans.SETTLED_S + 2)
        duty.cancel()

    virtual_time.run(scenario(), 1)
    assert named_s == [close_lost_plans.SETTLED_S, 2 * close_lost_plans.SETTLED_S]
