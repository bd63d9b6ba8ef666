"""The store node of a plan: both legs hear of it, and the conductor hears at once that a prefill leg is over."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from mooncache.gateway.core.next_step import LegEnd, LegStep, next_step, prefill_may_follow
from mooncache.gateway.core.plan import Attempts, LegPlan, RequestPlan
from mooncache.kvcache.leg_hint import LegHint, LegRole
from mooncache.proto.v1 import conductor_pb2 as pb
from tests.conditions import WAIT_S, until
from tests.gateway.model_folder import BLOCK_TOKENS
from tests.gateway.stand_in import Bench, FakeEngine, good
from tests.gateway.test_two_legs import CHAT, RENDERED, ask_of, broken, post, two_legs


def planned(bench: Bench, store_node: str, prefill: str = "p1") -> pb.ScheduleResponse:
    plan = bench.plan("d1", prefill)
    plan.store_node = store_node
    return plan


def prefill_failures(bench: Bench) -> list[pb.ReportProgressRequest]:
    phase = pb.REQUEST_PHASE_PREFILL_FAILED
    return [update for update in bench.conductor.updates if update.phase == phase]


def test_the_hint_carries_it() -> None:
    hint = LegHint(role=LegRole.DECODE, wait_tokens=16, store_node="node-1", request_id="r")
    assert LegHint.from_params(hint.to_params()) == hint
    assert LegHint.from_params({"mooncache": {"store_node": 7}}).store_node == ""
    assert LegHint.from_params({"mooncache": {"store_node": "x" * 300}}).store_node == ""


def test_a_decode_leg_that_waits_at_another_node_is_sent_again() -> None:
    old = RequestPlan(LegPlan("d", ""), LegPlan("p1", ""), store_node="n1")
    new = RequestPlan(LegPlan("d", ""), LegPlan("p2", ""), store_node="n1")
    moved = RequestPlan(LegPlan("d", ""), LegPlan("p2", ""), store_node="n2")
    assert next_step(LegRole.PREFILL, LegEnd.FAILED, old, new) is LegStep.SEND_PREFILL
    assert next_step(LegRole.PREFILL, LegEnd.FAILED, old, moved) is LegStep.SEND_BOTH


def test_whether_another_prefill_leg_may_follow() -> None:
    fresh, tired = Attempts(), Attempts(prefill_failures=1)
    for end, follows in (
        (LegEnd.FAILED, True),
        (LegEnd.DIED, True),
        (LegEnd.REFUSED, False),
        (LegEnd.DONE, False),
    ):
        assert prefill_may_follow(end, fresh, prefill_attempts=2) is follows
        assert not prefill_may_follow(end, tired, prefill_attempts=2)


async def test_both_legs_hear_of_the_node(
    tmp_path: Path, tokenizer_folder: Path, http: aiohttp.ClientSession
) -> None:
    async with two_legs(tmp_path, tokenizer_folder) as bench:
        bench.conductor.plans = [planned(bench, "node-7")]
        await post(bench, http, CHAT)
        for name in ("p1", "d1"):
            assert ask_of(bench.engines[name].requests[0]).store_node == "node-7"
        bench.conductor.plans = [bench.plan("d1", "p1")]
        await post(bench, http, CHAT)
        assert ask_of(bench.engines["d1"].requests[1]).store_node == ""


async def test_a_leg_that_waits_for_nothing_is_sent_to_no_node(
    tmp_path: Path, tokenizer_folder: Path, http: aiohttp.ClientSession
) -> None:
    async with two_legs(tmp_path, tokenizer_folder) as bench:
        plan = bench.plan("d1")
        plan.store_node = "node-7"
        bench.conductor.plans = [plan]
        await post(bench, http, CHAT)
        assert ask_of(bench.engines["d1"].requests[0]).store_node == ""
        plan.decode.wait_tokens = 2 * BLOCK_TOKENS
        await post(bench, http, CHAT)
        assert ask_of(bench.engines["d1"].requests[1]).store_node == "node-7", "it waits for another request"


@pytest.mark.parametrize("attempts", [1, 2])
async def test_the_end_of_a_prefill_leg_is_reported_while_the_request_goes_on(
    tmp_path: Path, tokenizer_folder: Path, http: aiohttp.ClientSession, attempts: int
) -> None:
    """The decode leg does not answer before the conductor has heard that no prefill leg is left."""

    async def after_the_report(engine: FakeEngine, request: web.Request, body: dict[str, Any]) -> Any:
        await until(lambda: len(prefill_failures(bench)) >= attempts)
        return await good(engine, request, body)

    settings = {"gateway__prefill_attempts": attempts}
    async with two_legs(tmp_path, tokenizer_folder, FakeEngine("p2", behave=broken), **settings) as bench:
        bench.engines["p1"].behave = broken
        bench.engines["d1"].behave = after_the_report
        bench.conductor.plans = [planned(bench, "node-7"), planned(bench, "node-7", "p2")]
        async with asyncio.timeout(WAIT_S):
            await post(bench, http, CHAT)
        follow = [update.prefill_may_follow for update in prefill_failures(bench)]
        assert follow == [True, False][2 - attempts :], "the last one says that none follows"
        assert "FINISHED" not in bench.conductor.phases()[:attempts]


async def test_the_conductor_learns_where_a_leg_waits_for_blocks_that_are_elsewhere(
    tmp_path: Path, tokenizer_folder: Path, http: aiohttp.ClientSession
) -> None:
    async def waits(engine: FakeEngine, request: web.Request, body: dict[str, Any]) -> Any:
        await asked.wait()
        return await good(engine, request, body)

    asked = asyncio.Event()
    async with two_legs(tmp_path, tokenizer_folder) as bench:
        bench.engines["p1"].held_tokens = 4096
        bench.engines["d1"].behave = waits
        plan = planned(bench, "node-7")
        plan.decode.handover_ms = 20
        bench.conductor.plans = [plan]
        bench.conductor.found_blocks = 100
        request = asyncio.create_task(post(bench, http, CHAT))
        await until(lambda: bench.conductor.asked_blocks)
        assert bench.conductor.asked_blocks == [len(RENDERED) // BLOCK_TOKENS]
        assert bench.conductor.asked_nodes == ["node-7"]
        asked.set()
        await request
