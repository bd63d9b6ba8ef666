"""Engines that become suspect while requests wait for their first token."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from mooncache.proto.v1 import conductor_pb2 as pb
from tests.conditions import until
from tests.gateway.stand_in import Bench, FakeEngine, good
from tests.gateway.test_two_legs import CHAT, hang, post, two_legs


def sick(bench: Bench, *names: str) -> None:
    """The conductor suspects some of the engines."""
    states = dict.fromkeys(names, pb.INSTANCE_STATE_SUSPECT)
    bench.conductor.set_instances(
        [
            engine.instance(state=states.get(name, pb.INSTANCE_STATE_READY))
            for name, engine in bench.engines.items()
        ]
    )


@pytest.mark.parametrize("stream", [True, False])
async def test_a_decode_engine_that_becomes_suspect_before_its_first_token_is_left(
    tmp_path: Path, tokenizer_folder: Path, http: aiohttp.ClientSession, stream: bool
) -> None:
    second = FakeEngine("d2", pb.INSTANCE_ROLE_DECODE)
    async with two_legs(tmp_path, tokenizer_folder, second) as bench:
        first = bench.engines["d1"]
        first.behave = hang
        bench.conductor.plans = [bench.plan("d1", "p1"), bench.plan("d2", "p1")]
        call = asyncio.create_task(read(bench, http) if stream else post(bench, http, CHAT))
        await first.asked.wait()
        sick(bench, "d1")
        await call
        await first.left.wait()
        assert list(bench.conductor.scheduled[-1].exclude) == ["d1"]
        assert len(second.requests) == 1
        await bench.conductor.wait_for_phase("FINISHED")
        codes = bench.conductor.last_legs()
        assert ("decode", "d1", "SUSPECT") in codes
        assert ("decode", "d2", "OK") in codes


async def test_an_answer_that_comes_while_another_plan_is_asked_for_ends_that_plan(
    tmp_path: Path, tokenizer_folder: Path, http: aiohttp.ClientSession
) -> None:
    """The conductor counts the new plan in place of the old one from the moment at which it makes it."""
    planning, answered, plan_made = asyncio.Event(), asyncio.Event(), asyncio.Event()

    async def answer_late(engine: FakeEngine, request: web.Request, body: dict[str, Any]) -> Any:
        await planning.wait()
        try:
            return await good(engine, request, body)
        finally:
            answered.set()

    second = FakeEngine("d2", pb.INSTANCE_ROLE_DECODE)
    async with two_legs(tmp_path, tokenizer_folder, second) as bench:
        first = bench.engines["d1"]
        first.behave = answer_late
        plans = [bench.plan("d1", decision_id="old"), bench.plan("d2", decision_id="beside")]
        new = bench.plan("d2", decision_id="new")

        async def plan(request: pb.ScheduleRequest) -> pb.ScheduleResponse:
            if request.attempt <= 1:
                return plans.pop(0)
            planning.set()
            await plan_made.wait()
            return new

        bench.conductor.think = plan
        call = asyncio.create_task(post(bench, http, CHAT))
        await first.asked.wait()
        sick(bench, "d1")
        await answered.wait()
        await post(bench, http, CHAT)  # whole, so the answer before it has come, too
        plan_made.set()
        await call
        ended = {"beside", "new"}
        await until(lambda: {report.decision_id for report in bench.conductor.updates} >= ended, "both ends")
        assert len(second.requests) == 1, "the request beside"


async def read(bench: Bench, http: aiohttp.ClientSession) -> None:
    url = bench.url + "/v1/chat/completions"
    async with http.post(url, json={**CHAT, "stream": True}, headers=bench.auth()) as response:
        assert (await response.text()).endswith("data: [DONE]\n\n")


async def test_a_suspect_engine_is_kept_when_no_other_can_take_the_request(
    tmp_path: Path, tokenizer_folder: Path, http: aiohttp.ClientSession
) -> None:
    gate = asyncio.Event()

    async def slow(engine: FakeEngine, request: web.Request, body: dict[str, Any]) -> Any:
        await gate.wait()
        return await good(engine, request, body)

    async with two_legs(tmp_path, tokenizer_folder) as bench:
        bench.engines["d1"].behave = slow
        refused = pb.ScheduleResponse(admitted=False, reason=pb.ADMISSION_REASON_NO_INSTANCE, message="none")
        bench.conductor.plans = [bench.plan("d1", "p1"), refused]
        call = asyncio.create_task(post(bench, http, CHAT))
        await bench.engines["d1"].asked.wait()
        sick(bench, "d1")
        await until(lambda: len(bench.conductor.scheduled) == 2)
        gate.set()
        await call
        assert len(bench.engines["d1"].requests) == 1


async def test_a_prefill_engine_that_becomes_suspect_is_left(
    tmp_path: Path, tokenizer_folder: Path, http: aiohttp.ClientSession
) -> None:
    second = FakeEngine("p2", pb.INSTANCE_ROLE_PREFILL)
    async with two_legs(tmp_path, tokenizer_folder, second) as bench:
        bench.engines["p1"].behave = hang
        bench.engines["d1"].behave = when_prefilled_by(second)
        bench.conductor.plans = [bench.plan("d1", "p1"), bench.plan("d1", "p2")]
        call = asyncio.create_task(post(bench, http, CHAT))
        await bench.engines["p1"].asked.wait()
        sick(bench, "p1")
        await call
        assert len(second.requests) == len(bench.engines["d1"].requests) == 1


def when_prefilled_by(prefill: FakeEngine) -> Any:
    """Answers once the prefill engine was asked."""

    async def answer(engine: FakeEngine, request: web.Request, body: dict[str, Any]) -> Any:
        await prefill.asked.wait()
        return await good(engine, request, body)

    return answer
