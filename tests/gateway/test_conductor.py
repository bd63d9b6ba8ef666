"""Life with a conductor that refuses, forgets, starts again or is away."""

from __future__ import annotations

import asyncio
import io
from pathlib import Path

import aiohttp
import pytest

from mooncache.errors import Internal, LimitExceeded, MooncacheError, NotLeader, Unauthenticated
from mooncache.gateway.shell import conductor
from mooncache.proto.v1 import conductor_pb2 as pb
from mooncache.runtime import logs
from tests.conditions import until
from tests.gateway.stand_in import MODEL, FakeEngine, running
from tests.gateway.test_requests import CHAT, ask


@pytest.mark.parametrize(
    ("reason", "status", "code"),
    [
        (pb.ADMISSION_REASON_TTFT, 429, "overloaded"),
        (pb.ADMISSION_REASON_CAPACITY, 429, "overloaded"),
        (pb.ADMISSION_REASON_NO_INSTANCE, 503, "no_instances"),
        (pb.ADMISSION_REASON_TOO_LONG, 400, "context_length_exceeded"),
    ],
)
async def test_refusals_of_the_conductor(
    tmp_path: Path, http: aiohttp.ClientSession, reason: pb.AdmissionReason, status: int, code: str
) -> None:
    async with running(tmp_path, [FakeEngine("e")]) as bench:
        bench.conductor.plans = [
            pb.ScheduleResponse(admitted=False, reason=reason, message="because", retry_after_ms=2500)
        ]
        found, answer, headers = await ask(bench, http, CHAT)
        assert (found, answer["error"]["code"]) == (status, code)
        if status in (429, 503):
            assert headers["retry-after"] == "3" and headers["retry-after-ms"] == "2500"


UNKNOWN = pb.ScheduleResponse(admitted=False, reason=pb.ADMISSION_REASON_UNKNOWN_MODEL, message="who?")
REASONS = {
    pb.ADMISSION_REASON_TTFT: (
        "The first token would take 9.3 s, 2 s are promised; come back in 7.3 s.",
        7312,
    ),
    pb.ADMISSION_REASON_TBT: ("A token would take 171 ms, 100 ms are promised; come back in 7.2 s.", 7207),
    pb.ADMISSION_REASON_CAPACITY: ("No decode instance has room for 7.4 s; come back in 7.4 s.", 7401),
}


async def test_tenants_learn_when_to_come_back_and_nothing_of_the_load_of_others(
    tmp_path: Path, http: aiohttp.ClientSession
) -> None:
    async with running(tmp_path, [FakeEngine("e")]) as bench:
        reported = []
        for auth in ({}, {"authorization": f"Bearer {bench.gateway.token.text}"}):
            for reason, (message, later_ms) in REASONS.items():
                bench.conductor.plans = [
                    pb.ScheduleResponse(
                        admitted=False, reason=reason, message=message, retry_after_ms=later_ms
                    )
                ]
                status, answer, headers = await ask(bench, http, CHAT, **auth)
                assert status == 429
                reported.append((answer, headers["retry-after-ms"], sorted(headers)))
        tenants, operators = reported[:3], reported[3:]
        assert [later for _, later, _ in tenants] == ["7500", "7250", "7500"]
        assert all(answer == tenants[0][0] and names == tenants[0][2] for answer, _, names in tenants)
        assert not any(character.isdigit() for character in tenants[0][0]["error"]["message"])
        assert [answer["error"]["message"] for answer, _, _ in operators] == [
            message for message, _ in REASONS.values()
        ]


async def test_refused_requests_cost_no_tokens(tmp_path: Path, http: aiohttp.ClientSession) -> None:
    async with running(tmp_path, [FakeEngine("e")], gateway__tokens_per_minute=60) as bench:
        full = pb.ScheduleResponse(
            admitted=False, reason=pb.ADMISSION_REASON_TTFT, message="full", retry_after_ms=1
        )
        bench.conductor.plans = [full]
        for _ in range(12):
            assert (await ask(bench, http, CHAT))[1]["error"]["code"] == "overloaded"
        bench.conductor.plans = [bench.plan("e")]
        assert (await ask(bench, http, CHAT))[0] == 200


async def test_conductor_that_forgot_the_model_is_no_404(tmp_path: Path, http: aiohttp.ClientSession) -> None:
    """It was started again a moment ago: its instances come back with their next report."""
    async with running(tmp_path, [FakeEngine("e")]) as bench:
        bench.conductor.plans = [UNKNOWN]
        status, _, headers = await ask(bench, http, CHAT)
        assert (status, headers["x-mooncache-decision"]) == (200, "unscheduled")


async def test_conductor_that_starts_again_with_no_instance_yet(
    tmp_path: Path, http: aiohttp.ClientSession
) -> None:
    async with running(tmp_path, [FakeEngine("e")]) as bench:
        version = bench.gateway.state.fleet.version
        bench.conductor.plans = [UNKNOWN]
        bench.conductor.set_instances([])
        await until(lambda: bench.gateway.state.fleet.version != version)
        assert (await ask(bench, http, CHAT))[0] == 200


async def test_plan_for_a_client_that_left_is_given_back(tmp_path: Path, http: aiohttp.ClientSession) -> None:
    asked, decided = asyncio.Event(), asyncio.Event()
    async with running(tmp_path, [FakeEngine("e")]) as bench:

        async def slowly(request: pb.ScheduleRequest) -> pb.ScheduleResponse:
            asked.set()
            await decided.wait()
            return bench.plan("e", decision_id="d-7")

        bench.conductor.think = slowly
        call = asyncio.create_task(ask(bench, http, CHAT))
        await asked.wait()
        call.cancel()
        await until(lambda: bench.gateway.state.active_count == 0)
        assert bench.conductor.updates == []
        decided.set()
        await bench.conductor.wait_for_phase("ABORTED")
        assert bench.conductor.updates[-1].decision_id == "d-7"
        assert bench.engines["e"].requests == []


async def test_plan_that_comes_too_late_is_given_back(
    tmp_path: Path, http: aiohttp.ClientSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The request went without it; the conductor would count it as work under way for minutes."""
    monkeypatch.setattr(conductor, "_SCHEDULE_TIMEOUT_S", 0.2)
    monkeypatch.setattr(conductor, "_LATE_PLAN_S", 60.0)
    decided = asyncio.Event()
    async with running(tmp_path, [FakeEngine("e")]) as bench:

        async def slowly(request: pb.ScheduleRequest) -> pb.ScheduleResponse:
            await decided.wait()
            return bench.plan("e", decision_id="d-7")

        bench.conductor.think = slowly
        status, _, headers = await ask(bench, http, CHAT)
        assert (status, headers["x-mooncache-decision"]) == (200, "unscheduled")
        assert bench.conductor.updates == []
        decided.set()
        await bench.conductor.wait_for_phase("ABORTED")
        assert (bench.conductor.updates[-1].decision_id, bench.conductor.updates[-1].code) == (
            "d-7",
            "REPLACED",
        )


async def test_without_the_conductor_requests_go_round_robin(
    tmp_path: Path, http: aiohttp.ClientSession
) -> None:
    engines = [FakeEngine("p", pb.INSTANCE_ROLE_PREFILL), FakeEngine("d1"), FakeEngine("d2")]
    async with running(tmp_path, engines) as bench:
        await bench.conductor.stop()
        for _ in range(4):
            status, _, headers = await ask(bench, http, CHAT)
            assert status == 200
            assert headers["x-mooncache-decision"] == "unscheduled"
        assert [len(engine.requests) for engine in engines] == [0, 2, 2]
        assert "unscheduled_total 4.0" in bench.gateway.metrics.render().decode()
        for engine in engines:
            await engine.stop()
        status, answer, headers = await ask(bench, http, CHAT)
        assert (status, answer["error"]["code"]) == (503, "engine_unavailable")
        assert "mooncache status" in answer["error"]["message"]
        assert headers["retry-after"] == "1"


@pytest.mark.parametrize("error", [Internal, LimitExceeded, Unauthenticated, NotLeader])
async def test_a_conductor_that_errs_fails_no_request(
    tmp_path: Path, http: aiohttp.ClientSession, error: type[MooncacheError]
) -> None:
    """A defect of a policy, a limit on calls, a token that was changed: nothing that a client can do about."""
    stream = io.StringIO()
    logs.setup("gateway", log_format="json", stream=stream)
    try:
        async with running(tmp_path, [FakeEngine("a"), FakeEngine("b")]) as bench:

            async def fails(_request: pb.ScheduleRequest) -> pb.ScheduleResponse:
                raise error("not now")

            bench.conductor.think = fails
            for _ in range(4):
                status, _, headers = await ask(bench, http, CHAT)
                assert (status, headers["x-mooncache-decision"]) == (200, "unscheduled")
            assert [len(engine.requests) for engine in bench.engines.values()] == [2, 2]
            page = bench.gateway.metrics.render().decode()
            assert f'conductor_errors_total{{code="{error.name}"}} 4.0' in page
            bench.conductor.think = None
            status, _, headers = await ask(bench, http, CHAT)
            assert (status, headers["x-mooncache-decision"]) == (200, "d-1")
    finally:
        logs.reset()
    assert stream.getvalue().count("conductor.refused") == 1


async def test_a_conductor_that_hangs_costs_one_question(
    tmp_path: Path, http: aiohttp.ClientSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It takes the call and says nothing. The next requests do not wait for it; later it is asked again."""
    monkeypatch.setattr(conductor, "_SCHEDULE_TIMEOUT_S", 0.2)
    monkeypatch.setattr(conductor, "_AVOID_S", 3600.0)
    async with running(tmp_path, [FakeEngine("e")]) as bench:

        async def hangs(_request: pb.ScheduleRequest) -> pb.ScheduleResponse:
            await asyncio.Event().wait()
            raise AssertionError

        bench.conductor.think = hangs
        for _ in range(4):
            status, _, headers = await ask(bench, http, CHAT)
            assert (status, headers["x-mooncache-decision"]) == (200, "unscheduled")
        assert len(bench.conductor.scheduled) == 1
        bench.conductor.think = None
        bench.gateway.state.conductor._avoid_until_s = 0.0
        status, _, headers = await ask(bench, http, CHAT)
        assert (status, headers["x-mooncache-decision"]) == (200, "d-1")


async def test_model_whose_last_instance_left_is_503_and_not_404(
    tmp_path: Path, http: aiohttp.ClientSession
) -> None:
    async with running(tmp_path, [FakeEngine("e")]) as bench:
        suspect = bench.engines["e"].instance(state=pb.INSTANCE_STATE_SUSPECT)
        bench.conductor.set_instances([suspect])
        await until(lambda: not bench.gateway.state.fleet.models[MODEL].instances)
        status, answer, _ = await ask(bench, http, CHAT)
        assert (status, answer["error"]["code"]) == (503, "no_instances")
        async with http.get(bench.url + "/v1/models", headers=bench.auth()) as response:
            assert (await response.json())["data"] == []
