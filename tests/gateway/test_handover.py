"""After the prefill leg: what a decode leg may still wait for, and what a tenant is told of all that."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from mooncache.gateway.core.plan import Handover, LegPlan
from mooncache.proto.v1 import conductor_pb2 as pb
from tests.conditions import until
from tests.gateway.model_folder import BLOCK_TOKENS
from tests.gateway.stand_in import Bench, FakeEngine, good, running
from tests.gateway.test_two_legs import CHAT, RENDERED, ask_of, broken, hang, post, two_legs, when_prefilled


def test_what_may_still_be_awaited() -> None:
    leg = LegPlan("d", "http://d", wait_tokens=64, wait_ms=9000, handover_ms=250)
    wait = Handover()
    wait.sent(64)
    assert wait.left_s(1.0) is None
    wait.prefilled(leg, 1.0)
    assert wait.left_s(1.1) == pytest.approx(0.15) and not wait.is_due(1.2)
    assert wait.is_due(1.3) and not wait.is_due(1.4), "the pool is asked once"
    wait.prefilled(leg, 2.0)
    wait.sent(0)
    assert wait.left_s(9.0) is None, "another leg that waits for nothing"
    wait.prefilled(leg, 2.0)
    assert not wait.is_due(99.0)


async def waits(engine: FakeEngine, request: web.Request, body: dict[str, Any]) -> Any:
    """A decode engine: it answers once it has what it was told to wait for, which never comes beyond `held_tokens`."""
    ask = ask_of(body)
    if ask.wait_ms and ask.wait_tokens > (engine.held_tokens or 0):
        await asyncio.Event().wait()
    return await good(engine, request, body)


def planned(bench: Bench, *, handover_ms: int = 0) -> pb.ScheduleResponse:
    plan = bench.plan("d1", "p1")
    plan.decode.handover_ms = handover_ms
    plan.decode.wait_ms = 600_000
    return plan


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("blocks", [0, 2])
async def test_a_decode_leg_hears_from_its_engine_what_was_not_stored(
    tmp_path: Path, tokenizer_folder: Path, http: aiohttp.ClientSession, stream: bool, blocks: int
) -> None:
    """Whoever writes blocks gives up at the node those that it could not store: sending the leg again would change
    nothing, so it answers in the one request that it has."""
    async with two_legs(tmp_path, tokenizer_folder) as bench:
        prefill, decode = bench.engines["p1"], bench.engines["d1"]
        prefill.held_tokens = blocks * BLOCK_TOKENS
        decode.release = asyncio.Event()  # type: ignore[attr-defined]
        decode.behave = when_prefilled
        bench.conductor.plans = [planned(bench, handover_ms=60_000)]

        async def asked() -> None:
            body = {**CHAT, "stream": stream}
            url = bench.url + "/v1/chat/completions"
            async with http.post(url, json=body, headers=bench.auth()) as response:
                assert response.status == 200
                await response.text()

        request = asyncio.create_task(asked())
        await bench.conductor.wait_for_phase("PREFILLED")
        decode.release.set()  # type: ignore[attr-defined]
        await request
        asks = [ask_of(body) for body in decode.requests]
        assert [ask.wait_tokens for ask in asks] == [len(RENDERED) // BLOCK_TOKENS * BLOCK_TOKENS]
        assert len(prefill.requests) == 1 and not bench.conductor.asked_blocks
        assert "waits_cut_total{" not in bench.gateway.metrics.render().decode()
        await bench.conductor.wait_for_phase("FINISHED")
        codes = {code for role, _, code in bench.conductor.last_legs() if role == "decode"}
        assert codes == {"OK"}


async def test_blocks_that_were_lost_on_their_way_are_not_awaited(
    tmp_path: Path, tokenizer_folder: Path, http: aiohttp.ClientSession
) -> None:
    async with two_legs(tmp_path, tokenizer_folder) as bench:
        decode = bench.engines["d1"]
        bench.engines["p1"].held_tokens = 4096
        decode.behave = waits
        bench.conductor.plans = [planned(bench, handover_ms=20)]
        bench.conductor.found_blocks = 1
        await post(bench, http, CHAT)
        assert [ask_of(body).wait_tokens for body in decode.requests][1:] == [0]
        assert bench.conductor.asked_blocks == [len(RENDERED) // BLOCK_TOKENS]
        assert 'waits_cut_total{reason="not_come"} 1.0' in bench.gateway.metrics.render().decode()


@pytest.mark.parametrize("found", [100, None])
async def test_a_decode_leg_that_is_only_busy_is_left_alone(
    tmp_path: Path, tokenizer_folder: Path, http: aiohttp.ClientSession, found: int | None
) -> None:
    async with two_legs(tmp_path, tokenizer_folder) as bench:
        decode = bench.engines["d1"]
        decode.release = asyncio.Event()  # type: ignore[attr-defined]
        decode.behave = when_prefilled
        bench.conductor.plans = [planned(bench, handover_ms=20)]
        bench.conductor.found_blocks = found
        request = asyncio.create_task(post(bench, http, CHAT))
        await until(lambda: bench.conductor.asked_blocks)
        decode.release.set()  # type: ignore[attr-defined]
        await request
        assert len(decode.requests) == 1 and len(bench.conductor.asked_blocks) == 1


async def test_an_engine_that_does_not_say_what_it_stored_changes_nothing(
    tmp_path: Path, tokenizer_folder: Path, http: aiohttp.ClientSession
) -> None:
    async with two_legs(tmp_path, tokenizer_folder) as bench:
        await post(bench, http, CHAT)
        await bench.conductor.wait_for_phase("FINISHED")
        assert len(bench.engines["d1"].requests) == 1 and not bench.conductor.asked_blocks


async def test_a_prefill_leg_for_a_prompt_without_keys_is_left_out(
    tmp_path: Path, http: aiohttp.ClientSession
) -> None:
    """The conductor was told that there are none; should it plan one all the same, the request is served."""
    engines = [
        FakeEngine("p1", pb.INSTANCE_ROLE_PREFILL),
        FakeEngine("d1", pb.INSTANCE_ROLE_DECODE, behave=waits),
    ]
    async with running(tmp_path, engines) as bench:
        plan = planned(bench)
        plan.decode.wait_tokens = 64
        bench.conductor.plans = [plan]
        await post(bench, http, CHAT)
        assert bench.conductor.scheduled[0].no_prefill
        assert not bench.engines["p1"].requests
        assert [ask_of(body).wait_tokens for body in bench.engines["d1"].requests] == [0]


async def test_tenants_learn_the_name_of_the_decision_only(
    tmp_path: Path, tokenizer_folder: Path, http: aiohttp.ClientSession
) -> None:
    async with two_legs(tmp_path, tokenizer_folder) as bench:
        for key, sees in ((bench.key(), False), (bench.gateway.token.text, True)):
            headers = {"authorization": f"Bearer {key}"}
            async with http.post(bench.url + "/v1/chat/completions", json=CHAT, headers=headers) as response:
                assert response.status == 200, await response.text()
                assert response.headers["x-mooncache-decision"] == "d-1"
                assert ("x-mooncache-plan" in response.headers) is sees
                reported = "".join(f"{name}: {value}\n" for name, value in response.headers.items())
                # Whole words: a request id of random letters may hold "d1".
                assert sees or not any(re.search(rf"\b{name}\b", reported) for name in bench.engines)


@pytest.mark.parametrize("how", ["away", "broken", "hang"])
async def test_errors_name_no_engine(tmp_path: Path, http: aiohttp.ClientSession, how: str) -> None:
    engine = FakeEngine("secret-engine-1", behave={"broken": broken, "hang": hang}.get(how))
    async with running(tmp_path, [engine], gateway__first_token_timeout_s=0.3) as bench:
        port = engine.url.rpartition(":")[2]
        if how == "away":
            await engine.stop()
        body = {**CHAT, "stream": True}
        async with http.post(bench.url + "/v1/chat/completions", json=body, headers=bench.auth()) as response:
            assert response.status >= 500
            reported = await response.text() + str(response.headers)
        assert engine.name not in reported and port not in reported and "127.0.0.1" not in reported
