"""Streams: what is relayed, what is held back, and every way in which either end can misbehave."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from mooncache.gateway.endpoints import completions
from tests.conditions import WAIT_S, until
from tests.gateway.stand_in import MODEL, Bench, FakeEngine, begin, chunk, running, send, usage_of

BODY: dict[str, Any] = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}], "stream": True}


async def read(bench: Bench, http: aiohttp.ClientSession, **more: Any) -> tuple[int, str]:
    async with http.post(
        bench.url + "/v1/chat/completions", json={**BODY, **more}, headers=bench.auth()
    ) as response:
        return response.status, await response.text()


def events(text: str) -> list[Any]:
    found = [part.removeprefix("data: ") for part in text.split("\n\n") if part.startswith("data: ")]
    return [part if part == "[DONE]" else json.loads(part) for part in found]


async def test_each_event_arrives_when_it_was_sent(tmp_path: Path, http: aiohttp.ClientSession) -> None:
    arrived = asyncio.Event()

    async def step_by_step(_engine: FakeEngine, request: web.Request, _body: dict[str, Any]) -> Any:
        response = await begin(request)
        await response.write(b": keep-alive\n\n")
        for text in ("one", "two"):
            await send(response, chunk(text))
            await arrived.wait()  # hangs when the gateway holds the event back
            arrived.clear()
        await response.write(b"data: [DONE]\n\n")
        return response

    async with running(tmp_path, [FakeEngine("e", behave=step_by_step)]) as bench:
        async with http.post(bench.url + "/v1/chat/completions", json=BODY, headers=bench.auth()) as response:
            assert response.headers["content-type"].startswith("text/event-stream")
            assert response.headers["cache-control"] == "no-cache"
            seen = b""
            for text in (b'"one"', b'"two"'):
                while text not in seen:
                    seen += await response.content.readany()
                arrived.set()
            seen += await response.content.read()
        assert seen.startswith(b": keep-alive\n\n")
        assert seen.endswith(b"data: [DONE]\n\n")


async def test_usage_only_when_asked_for(tmp_path: Path, http: aiohttp.ClientSession) -> None:
    async with running(tmp_path, [FakeEngine("e", cached_tokens=8)]) as bench:
        _, text = await read(bench, http)
        assert "usage" not in text and "kv_transfer_params" not in text
        assert bench.engines["e"].requests[0]["stream_options"]["include_usage"] is True
        _, text = await read(bench, http, stream_options={"include_usage": True})
        last = events(text)[-2]
        assert last["choices"] == []
        assert last["usage"]["prompt_tokens_details"] == {"cached_tokens": 8}
        await until(lambda: "output_tokens_total" in bench.gateway.metrics.render().decode())
        line = f'mooncache_gateway_output_tokens_total{{model="{MODEL}"}} 6.0'
        await until(lambda: line in bench.gateway.metrics.render().decode())


async def test_events_cut_anywhere_by_the_network(tmp_path: Path, http: aiohttp.ClientSession) -> None:
    async def in_bytes(engine: FakeEngine, request: web.Request, _body: dict[str, Any]) -> Any:
        response = await begin(request)
        last = {**chunk("", usage=usage_of(engine), kv_transfer_params={"mooncache": {}}), "choices": []}
        text = "".join(f"data: {json.dumps(event)}\n\n" for event in (chunk("ä🙂"), last))
        data = text.encode() + b"data: [DONE]\r\n\r\n"
        for at in range(0, len(data), 7):
            await response.write(data[at : at + 7])
            await asyncio.sleep(0)
        return response

    async with running(tmp_path, [FakeEngine("e", behave=in_bytes)]) as bench:
        _, text = await read(bench, http, stream_options={"include_usage": True})
        found = events(text.replace("\r\n", "\n"))
        assert found[0]["choices"][0]["delta"]["content"] == "ä🙂"
        assert "kv_transfer_params" not in text
        assert found[-1] == "[DONE]"


async def cut_off(_engine: FakeEngine, request: web.Request, _body: dict[str, Any]) -> Any:
    response = await begin(request)
    await send(response, chunk("one"))
    await response.write(b'data: {"id": "half of an ev')
    assert request.transport is not None
    request.transport.abort()
    return response


async def no_done(_engine: FakeEngine, request: web.Request, _body: dict[str, Any]) -> Any:
    response = await begin(request)
    await send(response, chunk("one"))
    return response


async def not_json(_engine: FakeEngine, request: web.Request, _body: dict[str, Any]) -> Any:
    response = await begin(request)
    await send(response, chunk("one"))
    await response.write(b'data: {"usage": oops}\n\n')
    await asyncio.Event().wait()


async def stalls(_engine: FakeEngine, request: web.Request, _body: dict[str, Any]) -> Any:
    response = await begin(request)
    await send(response, chunk("one"))
    await asyncio.Event().wait()


async def says_error(_engine: FakeEngine, request: web.Request, _body: dict[str, Any]) -> Any:
    response = await begin(request)
    await send(response, chunk("one"))
    await send(response, {"object": "error", "message": "it broke", "type": "Internal", "code": 500})
    await asyncio.Event().wait()


@pytest.mark.parametrize(
    ("behave", "code"),
    [
        (cut_off, "engine_failed"),
        (no_done, "engine_failed"),
        (not_json, "engine_failed"),
        (stalls, "engine_timeout"),
        (says_error, 500),
    ],
)
async def test_failure_in_the_middle_is_an_event_and_an_end(
    tmp_path: Path, http: aiohttp.ClientSession, behave: Any, code: Any
) -> None:
    async with running(tmp_path, [FakeEngine("e", behave=behave)], gateway__stall_timeout_s=0.3) as bench:
        status, text = await read(bench, http)
        assert status == 200
        found = events(text)
        assert found[0]["choices"][0]["delta"]["content"] == "one"
        assert set(found[1]["error"]) == {"message", "type", "param", "code"}
        assert found[1]["error"]["code"] == code
        assert found[2:] == ["[DONE]"]
        assert "half of an ev" not in text
        await bench.conductor.wait_for_phase("FAILED")


async def test_engine_that_breaks_off_before_the_first_token_is_replaced(
    tmp_path: Path, http: aiohttp.ClientSession
) -> None:
    async def empty(_engine: FakeEngine, request: web.Request, _body: dict[str, Any]) -> Any:
        response = await begin(request)
        await response.write(b": waiting\n\n")
        return response

    engines = [FakeEngine("e1", behave=empty), FakeEngine("e2")]
    async with running(tmp_path, engines) as bench:
        bench.conductor.plans = [bench.plan("e1"), bench.plan("e2")]
        status, text = await read(bench, http)
        assert status == 200
        assert len(events(text)) == 4
        assert "error" not in text


async def test_hanging_engine_without_another_is_504(tmp_path: Path, http: aiohttp.ClientSession) -> None:
    async def hang(_engine: FakeEngine, _request: web.Request, _body: dict[str, Any]) -> Any:
        await asyncio.Event().wait()

    async with running(tmp_path, [FakeEngine("e", behave=hang)], gateway__first_token_timeout_s=0.2) as bench:
        bench.conductor.plans = [bench.plan("e"), stand_in_refusal()]
        status, text = await read(bench, http)
        assert status == 504
        assert json.loads(text)["error"]["code"] == "engine_timeout"
        async with asyncio.timeout(WAIT_S):
            await bench.engines["e"].left.wait()


def stand_in_refusal() -> Any:
    from mooncache.proto.v1 import conductor_pb2 as pb

    return pb.ScheduleResponse(admitted=False, reason=pb.ADMISSION_REASON_NO_INSTANCE, message="none left")


async def endless(_engine: FakeEngine, request: web.Request, _body: dict[str, Any]) -> Any:
    response = await begin(request)
    while True:
        await send(response, chunk("more"))
        await asyncio.sleep(0.01)


async def test_whole_request_has_a_limit(tmp_path: Path, http: aiohttp.ClientSession) -> None:
    async with running(tmp_path, [FakeEngine("e", behave=endless)], gateway__request_timeout_s=0.5) as bench:
        _, text = await read(bench, http)
        assert events(text)[-2]["error"]["code"] == "engine_timeout"
        assert events(text)[-1] == "[DONE]"


async def test_client_that_takes_nothing_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(completions, "SILENCE_MAX_S", 0.3)

    async def flood(_engine: FakeEngine, request: web.Request, _body: dict[str, Any]) -> Any:
        response = await begin(request)
        while True:
            await send(response, chunk("x" * 65536))

    async with running(tmp_path, [FakeEngine("e", behave=flood)]) as bench:
        reader, writer = await asyncio.open_connection("127.0.0.1", bench.gateway.http_port, limit=1024)
        data = json.dumps(BODY).encode()
        head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {len(data)}\r\n"
        writer.write(f"{head}authorization: Bearer {bench.key()}\r\n\r\n".encode() + data)
        await reader.readline()  # and nothing more
        await bench.conductor.wait_for_phase("ABORTED")
        async with asyncio.timeout(WAIT_S):
            await bench.engines["e"].left.wait()
        await until(lambda: bench.gateway.state.active_count == 0)
        writer.transport.abort()


async def test_client_that_leaves_in_the_middle_stops_the_engine(
    tmp_path: Path, http: aiohttp.ClientSession
) -> None:
    async with running(tmp_path, [FakeEngine("e", behave=endless)]) as bench:
        response = await http.post(bench.url + "/v1/chat/completions", json=BODY, headers=bench.auth())
        await response.content.readany()
        response.close()
        async with asyncio.timeout(WAIT_S):
            await bench.engines["e"].left.wait()
        await bench.conductor.wait_for_phase("ABORTED")


async def test_shutdown_ends_open_streams_with_an_error(tmp_path: Path, http: aiohttp.ClientSession) -> None:
    async with running(tmp_path, [FakeEngine("e", behave=stalls)]) as bench:
        async with http.post(bench.url + "/v1/chat/completions", json=BODY, headers=bench.auth()) as response:
            await response.content.readany()
            await bench.gateway.stop()
            text = (await response.content.read()).decode()
        assert events(text)[0]["error"]["code"] == "shutting_down"
        assert events(text)[1] == "[DONE]"
