"""Prefill and decode legs: both at the same time, retries, recomputation, and what the client sees of it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from mooncache.auth import cache_salt, parse_session_token
from mooncache.kvcache.keys import content_passport, request_keys
from mooncache.kvcache.leg_hint import CacheReport, LegHint
from mooncache.proto.v1 import conductor_pb2 as pb
from tests.conditions import WAIT_S, until
from tests.gateway.model_folder import BLOCK_TOKENS, instance_fields, passport_of
from tests.gateway.stand_in import MODEL, Bench, FakeEngine, begin, chunk, good, running, send, usage_of

TEXT = "the quick brown fox jumps over the lazy dog, again and again"
CHAT: dict[str, Any] = {"model": MODEL, "messages": [{"role": "user", "content": TEXT}]}
RENDERED = f"<user>{TEXT}<a>"


@asynccontextmanager
async def two_legs(tmp_path: Path, folder: Path, *more: FakeEngine, **settings: Any) -> AsyncIterator[Bench]:
    """One prefill and one decode engine, planned as such, with tokenizer and passport."""
    engines = [
        FakeEngine("p1", pb.INSTANCE_ROLE_PREFILL, cached_tokens=32),
        FakeEngine("d1", pb.INSTANCE_ROLE_DECODE, cached_tokens=39),
        *more,
    ]
    async with running(tmp_path, engines, instance=instance_fields(folder), **settings) as bench:
        bench.conductor.plans = [bench.plan("d1", "p1")]
        model = bench.gateway.state.fleet.models[MODEL]
        await bench.gateway.state.tokenizers.prepare(model)
        await until(lambda: bench.gateway.state.tokenizers._entries[MODEL].reader is not None)
        yield bench


async def post(bench: Bench, http: aiohttp.ClientSession, body: dict[str, Any], path: str = "") -> Any:
    url = bench.url + (path or "/v1/chat/completions")
    async with http.post(url, json=body, headers=bench.auth()) as response:
        assert response.status == 200, await response.text()
        return await response.json()


def ask_of(body: dict[str, Any]) -> LegHint:
    return LegHint.from_params(body["kv_transfer_params"])


async def test_both_legs_carry_the_same_id_salt_and_tokens(
    tmp_path: Path, tokenizer_folder: Path, http: aiohttp.ClientSession
) -> None:
    async with two_legs(tmp_path, tokenizer_folder) as bench:
        extra = {"temperature": 0.5, "unknown_field": {"a": [1.50]}, "cache_salt": "mine", "priority": 3}
        headers = {**bench.auth(), "x-request-id": "req-1"}
        async with http.post(
            bench.url + "/v1/chat/completions",
            json={
                **CHAT,
                **extra,
                "kv_transfer_params": {"mooncache": {"role": "evil"}},
                "bootstrap_host": "x",
            },
            headers=headers,
        ) as response:
            assert response.status == 200
            assert response.headers["x-request-id"] == "req-1"
            answer = await response.json()
        prefill, decode = bench.engines["p1"], bench.engines["d1"]
        assert prefill.paths == ["/v1/completions"]
        assert decode.paths == ["/v1/chat/completions"]
        salt = cache_salt(bench.gateway.token, "alice", "mine")
        tokens = prefill.requests[0]["prompt"]
        assert len(tokens) == len(RENDERED)
        complete = len(tokens) // BLOCK_TOKENS * BLOCK_TOKENS
        assert prefill.requests[0]["max_tokens"] == 1
        assert not prefill.requests[0]["stream"]
        assert {prefill.requests[0]["cache_salt"], decode.requests[0]["cache_salt"]} == {salt}
        assert ask_of(prefill.requests[0]).role == "prefill"
        hint = ask_of(decode.requests[0])
        assert parse_session_token(hint.session_token).tenant == "alice"
        assert hint == LegHint(
            role="decode",
            wait_tokens=complete,
            wait_ms=1000,
            request_id="req-1",
            decision_id="d-1",
            session_token=hint.session_token,
        )
        assert ask_of(prefill.requests[0]).session_token == hint.session_token
        assert bench.conductor.scheduled[0].pool_tenant == "alice"
        assert prefill.headers[0]["x-request-id"] == decode.headers[0]["x-request-id"] == "req-1"
        sent = decode.requests[0]
        assert sent["unknown_field"] == {"a": [1.5]}
        assert "bootstrap_host" not in sent and "priority" not in sent
        # the prefill leg's number counts, and nothing internal comes back
        assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == 32
        assert answer["usage"]["completion_tokens"] == 3
        assert "kv_transfer_params" not in answer
        scheduled = bench.conductor.scheduled[0]
        passport = passport_of(tokenizer_folder)
        assert scheduled.keys == request_keys(passport, tokens, salt=salt)
        assert scheduled.content_keys == content_passport(BLOCK_TOKENS).chain_keys(tokens)
        assert (scheduled.tenant, scheduled.request_id, scheduled.prompt_tokens) == (
            "alice",
            "req-1",
            len(tokens),
        )
        await bench.conductor.wait_for_phase("FINISHED")
        assert bench.conductor.phases() == ["PREFILLED", "FIRST_TOKEN", "FINISHED"]
        assert bench.conductor.updates[-1].cached_tokens == 32
        assert [role for role, _, _ in bench.conductor.last_legs()] == ["prefill", "decode"]


async def test_tenants_get_different_keys(
    tmp_path: Path, tokenizer_folder: Path, http: aiohttp.ClientSession
) -> None:
    async with two_legs(tmp_path, tokenizer_folder) as bench:
        for tenant in ("alice", "bob", "alice"):
            async with http.post(
                bench.url + "/v1/chat/completions", json=CHAT, headers=bench.auth(tenant)
            ) as response:
                assert response.status == 200
        alice, bob, again = bench.conductor.scheduled
        assert alice.keys == again.keys
        assert alice.keys != bob.keys
        assert alice.content_keys == bob.content_keys


async def test_decode_leg_does_not_wait_for_the_prefill_leg_to_be_sent(
    tmp_path: Path, tokenizer_folder: Path, http: aiohttp.ClientSession
) -> None:
    async def slow(engine: FakeEngine, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        await bench.engines["d1"].asked.wait()  # hangs forever when decode is sent only afterwards
        return await good(engine, request, body)

    async with two_legs(tmp_path, tokenizer_folder) as bench:
        bench.engines["p1"].behave = slow
        await post(bench, http, CHAT)
        assert len(bench.engines["d1"].requests) == 1


async def test_stream_usage_comes_from_both_legs(
    tmp_path: Path, tokenizer_folder: Path, http: aiohttp.ClientSession
) -> None:
    async def after_prefill(engine: FakeEngine, request: web.Request, body: dict[str, Any]) -> Any:
        await bench.conductor.wait_for_phase("PREFILLED")
        return await good(engine, request, body)

    async with two_legs(tmp_path, tokenizer_folder) as bench:
        bench.engines["d1"].behave = after_prefill
        body = {**CHAT, "stream": True, "stream_options": {"include_usage": True}}
        async with http.post(bench.url + "/v1/chat/completions", json=body, headers=bench.auth()) as response:
            text = await response.text()
        assert '"cached_tokens":32' in text
        assert "kv_transfer_params" not in text
        assert text.endswith("data: [DONE]\n\n")


async def broken(_engine: FakeEngine, _request: web.Request, _body: dict[str, Any]) -> web.Response:
    return web.json_response({"object": "error", "message": "out of memory", "code": 500}, status=500)


async def hang(_engine: FakeEngine, _request: web.Request, _body: dict[str, Any]) -> web.Response:
    await asyncio.Event().wait()
    raise AssertionError("never")


async def when_prefilled(engine: FakeEngine, request: web.Request, body: dict[str, Any]) -> Any:
    """A decode engine that waits for blocks as the connector does: forever unless it need not wait."""
    if ask_of(body).wait_tokens:
        await engine.release.wait()  # type: ignore[attr-defined]
    return await good(engine, request, body)


async def test_failed_prefill_goes_to_another_instance_and_decode_goes_on_waiting(
    tmp_path: Path, tokenizer_folder: Path, http: aiohttp.ClientSession
) -> None:
    async def release(engine: FakeEngine, request: web.Request, body: dict[str, Any]) -> Any:
        bench.engines["d1"].release.set()  # type: ignore[attr-defined]
        return await good(engine, request, body)

    second = FakeEngine("p2", pb.INSTANCE_ROLE_PREFILL, cached_tokens=16)
    async with two_legs(tmp_path, tokenizer_folder, second) as bench:
        bench.engines["d1"].release = asyncio.Event()  # type: ignore[attr-defined]
        bench.engines["d1"].behave, bench.engines["p1"].behave, second.behave = (
            when_prefilled,
            broken,
            release,
        )
        bench.conductor.plans = [bench.plan("d1", "p1"), bench.plan("d1", "p2", decision_id="d-2")]
        answer = await post(bench, http, CHAT)
        assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == 16
        assert len(bench.engines["d1"].requests) == 1
        again = bench.conductor.scheduled[1]
        assert list(again.exclude) == ["p1"] and again.attempt == 2
        await bench.conductor.wait_for_phase("FINISHED")
        assert bench.conductor.phases()[0] == "PREFILL_FAILED"


async def test_out_of_prefill_attempts_decode_recomputes(
    tmp_path: Path, tokenizer_folder: Path, http: aiohttp.ClientSession
) -> None:
    second = FakeEngine("p2", pb.INSTANCE_ROLE_PREFILL, behave=broken)
    async with two_legs(tmp_path, tokenizer_folder, second) as bench:
        decode = bench.engines["d1"]
        decode.release = asyncio.Event()  # type: ignore[attr-defined]
        decode.behave, bench.engines["p1"].behave = when_prefilled, broken
        bench.conductor.plans = [bench.plan("d1", "p1"), bench.plan("d1", "p2")]
        answer = await post(bench, http, CHAT)
        assert [ask_of(body).wait_tokens for body in decode.requests][-1] == 0
        assert len(decode.requests) == 2
        # what the decode instance itself found
        assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == 39
        assert "recomputed_total 1.0" in bench.gateway.metrics.render().decode()
        async with asyncio.timeout(WAIT_S):
            await decode.left.wait()  # the first decode leg was aborted


async def test_prefill_engine_that_cannot_be_reached(
    tmp_path: Path, tokenizer_folder: Path, http: aiohttp.ClientSession
) -> None:
    async with two_legs(tmp_path, tokenizer_folder, gateway__prefill_attempts=1) as bench:
        await bench.engines["p1"].stop()
        await post(bench, http, CHAT)
        assert [ask_of(body).wait_tokens for body in bench.engines["d1"].requests][-1] == 0


async def test_prefill_that_hangs_is_given_up(
    tmp_path: Path, tokenizer_folder: Path, http: aiohttp.ClientSession
) -> None:
    async with two_legs(
        tmp_path, tokenizer_folder, gateway__prefill_attempts=1, gateway__first_token_timeout_s=0.3
    ) as bench:
        decode = bench.engines["d1"]
        decode.release = asyncio.Event()  # type: ignore[attr-defined]
        decode.behave, bench.engines["p1"].behave = when_prefilled, hang
        await post(bench, http, CHAT)  # not streamed: the decode leg's own limit is the request's
        async with asyncio.timeout(WAIT_S):
            await bench.engines["p1"].left.wait()


async def test_failed_decode_goes_to_another_instance(
    tmp_path: Path, tokenizer_folder: Path, http: aiohttp.ClientSession
) -> None:
    second = FakeEngine("d2", pb.INSTANCE_ROLE_DECODE)
    async with two_legs(tmp_path, tokenizer_folder, second) as bench:
        bench.engines["d1"].behave = broken
        bench.conductor.plans = [bench.plan("d1", "p1"), bench.plan("d2", "p1")]
        body = {**CHAT, "stream": True}
        async with http.post(bench.url + "/v1/chat/completions", json=body, headers=bench.auth()) as response:
            assert response.status == 200
            assert (await response.text()).endswith("data: [DONE]\n\n")
        assert list(bench.conductor.scheduled[-1].exclude) == ["d1"]
        assert len(second.requests) == 1


async def test_engines_that_count_other_tokens_get_no_keys(
    tmp_path: Path, tokenizer_folder: Path, http: aiohttp.ClientSession
) -> None:
    """As with a chat template that only the engine has."""
    count = 39

    async def counts(engine: FakeEngine, _request: web.Request, _body: dict[str, Any]) -> web.Response:
        return web.json_response({"choices": [], "usage": {**usage_of(engine), "prompt_tokens": count}})

    async with two_legs(tmp_path, tokenizer_folder) as bench:
        bench.engines["d1"].behave = counts
        bench.conductor.plans = [bench.plan("d1")]
        for expected, there in ((len(RENDERED), True), (39, True), (39, True), (39, True), (39, False)):
            count = expected
            await post(bench, http, CHAT)
            assert bool(bench.conductor.scheduled[-1].keys) is there
        page = bench.gateway.metrics.render().decode()
        assert 'no_keys_total{reason="other_counts"} 1.0' in page


async def test_a_decode_leg_that_waited_in_vain_is_counted(
    tmp_path: Path, tokenizer_folder: Path, http: aiohttp.ClientSession
) -> None:
    async def in_vain(engine: FakeEngine, _request: web.Request, _body: dict[str, Any]) -> web.Response:
        reported = CacheReport(outcome="timeout", waited_ms=900.0).to_params()
        answer = {"choices": [], "usage": usage_of(engine), "kv_transfer_params": reported}
        return web.json_response(answer)

    async with two_legs(tmp_path, tokenizer_folder) as bench:
        bench.engines["d1"].behave = in_vain
        await post(bench, http, CHAT)
        page = bench.gateway.metrics.render().decode()
        assert 'waits_timed_out_total{model="test-model"} 1.0' in page


async def test_client_that_leaves_aborts_both_legs(
    tmp_path: Path, tokenizer_folder: Path, http: aiohttp.ClientSession
) -> None:
    async with two_legs(tmp_path, tokenizer_folder) as bench:
        bench.engines["d1"].behave = bench.engines["p1"].behave = hang
        call = asyncio.create_task(post(bench, http, CHAT))
        async with asyncio.timeout(WAIT_S):
            await bench.engines["p1"].asked.wait()
            await bench.engines["d1"].asked.wait()
            call.cancel()
            await bench.engines["p1"].left.wait()
            await bench.engines["d1"].left.wait()
            await bench.conductor.wait_for_phase("ABORTED")
        await until(lambda: bench.gateway.state.active_count == 0)


async def test_lists_of_prompts_and_n_go_through_both_legs(
    tmp_path: Path, tokenizer_folder: Path, http: aiohttp.ClientSession
) -> None:
    async with two_legs(tmp_path, tokenizer_folder) as bench:
        body = {"model": MODEL, "prompt": ["a" * 40, "b" * 20], "n": 2}
        await post(bench, http, body, "/v1/completions")
        prefill, decode = bench.engines["p1"].requests[0], bench.engines["d1"].requests[0]
        assert [len(tokens) for tokens in prefill["prompt"]] == [40, 20]
        assert decode["prompt"] == body["prompt"] and decode["n"] == 2
        assert ask_of(decode).wait_tokens == 32
        assert bench.conductor.scheduled[0].sequence_count == 4


@pytest.mark.parametrize("extra", [{"prompt_logprobs": 1}, {"echo": True, "logprobs": 2}])
async def test_what_needs_the_whole_prompt_is_not_split(
    tmp_path: Path, tokenizer_folder: Path, http: aiohttp.ClientSession, extra: dict[str, Any]
) -> None:
    async with two_legs(tmp_path, tokenizer_folder) as bench:
        bench.conductor.plans = [bench.plan("d1")]
        await post(bench, http, {"model": MODEL, "prompt": "x" * 64, **extra}, "/v1/completions")
        assert bench.conductor.scheduled[0].no_prefill
        assert not bench.conductor.scheduled[0].keys


async def test_other_tokenizer_than_the_engines_gives_no_keys(
    tmp_path: Path, tokenizer_folder: Path, http: aiohttp.ClientSession
) -> None:
    async with two_legs(tmp_path, tokenizer_folder) as bench:
        bench.gateway.state.tokenizers._entries[MODEL].digest = "another"
        bench.conductor.plans = [bench.plan("d1")]
        await post(bench, http, CHAT)
        assert bench.conductor.scheduled[0].keys == b""
        assert bench.conductor.scheduled[0].no_prefill
        assert 'no_keys_total{reason="other_tokenizer"} 1.0' in bench.gateway.metrics.render().decode()


async def test_prompt_that_cannot_fit_is_refused_before_any_engine(
    tmp_path: Path, tokenizer_folder: Path, http: aiohttp.ClientSession
) -> None:
    async with two_legs(tmp_path, tokenizer_folder) as bench:
        for body in ({"prompt": "x" * 5000}, {"prompt": "x" * 4000, "max_tokens": 200}):
            async with http.post(
                bench.url + "/v1/completions", json={"model": MODEL, **body}, headers=bench.auth()
            ) as response:
                assert response.status == 400
                error = (await response.json())["error"]
                assert error["code"] == "context_length_exceeded"
                assert "4096" in error["message"]
        assert not bench.conductor.scheduled
        assert not any(engine.requests for engine in bench.engines.values())


async def test_public_prefix_is_shared_and_the_rest_is_not(
    tmp_path: Path, tokenizer_folder: Path, http: aiohttp.ClientSession
) -> None:
    system = "S" * 64
    async with two_legs(tmp_path, tokenizer_folder, gateway__public_prefix_enabled=True) as bench:
        for tenant, public in (("alice", 1), ("bob", 1), ("carol", 0)):
            messages = [{"role": "system", "content": system}, {"role": "user", "content": "U" * 64}]
            body = {"model": MODEL, "messages": messages, "mooncache": {"public_messages": public}}
            async with http.post(
                bench.url + "/v1/chat/completions", json=body, headers=bench.auth(tenant)
            ) as response:
                assert response.status == 200
        alice, bob, carol = ([keys[at : at + 32] for at in range(0, len(keys), 32)] for keys in
                             (request.keys for request in bench.conductor.scheduled))  # fmt: skip
        shared = len(f"<system>{system}") // BLOCK_TOKENS
        assert alice[:shared] == bob[:shared]
        assert not set(alice[shared:]) & set(bob[shared:])
        assert not set(carol) & set(alice + bob)
        ask = ask_of(bench.engines["d1"].requests[0])
        assert ask.public_tokens // BLOCK_TOKENS == shared
        assert ask.public_salt
        assert not ask_of(bench.engines["d1"].requests[2]).public_salt
        assert all("mooncache" not in body for body in bench.engines["d1"].requests)


@pytest.mark.parametrize("stream", [False, True])
async def test_decode_answer_that_overtakes_the_prefill_leg(
    tmp_path: Path, tokenizer_folder: Path, http: aiohttp.ClientSession, stream: bool
) -> None:
    """The blocks are in the pool a moment before the prefill engine has written its answer."""

    async def late(engine: FakeEngine, request: web.Request, body: dict[str, Any]) -> Any:
        await sent.wait()
        return await good(engine, request, body)

    async def first(engine: FakeEngine, request: web.Request, body: dict[str, Any]) -> Any:
        if not body.get("stream"):
            sent.set()
            return await good(engine, request, body)
        response = await begin(request)
        await send(response, chunk("one"))
        sent.set()
        await bench.conductor.wait_for_phase("PREFILLED")
        await send(response, {**chunk("", usage=usage_of(engine)), "choices": []})
        await response.write(b"data: [DONE]\n\n")
        return response

    sent = asyncio.Event()
    async with two_legs(tmp_path, tokenizer_folder) as bench:
        bench.engines["p1"].behave, bench.engines["d1"].behave = late, first
        body = {**CHAT, "stream": stream, **({"stream_options": {"include_usage": True}} if stream else {})}
        async with http.post(bench.url + "/v1/chat/completions", json=body, headers=bench.auth()) as response:
            assert response.status == 200
            text = await response.text()
        assert '"cached_tokens":32' in text
        await bench.conductor.wait_for_phase("FINISHED")
        assert len(bench.engines["d1"].requests) == 1


async def test_prefill_leg_that_is_still_busy_at_the_end_is_given_up(
    tmp_path: Path, tokenizer_folder: Path, http: aiohttp.ClientSession
) -> None:
    async with two_legs(tmp_path, tokenizer_folder) as bench:
        bench.engines["p1"].behave = hang
        plan = bench.plan("d1", "p1")
        plan.pool_hit_tokens = 16
        bench.conductor.plans = [plan]
        answer = await post(bench, http, CHAT)
        # the decode leg's 39 may be what the prefill leg has just computed
        assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == 16
        async with asyncio.timeout(WAIT_S):
            await bench.engines["p1"].left.wait()
