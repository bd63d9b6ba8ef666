"""Every kind of bad request, who may call, limits, models, and life without a conductor."""

from __future__ import annotations

import asyncio
import hashlib
import io
import json
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from mooncache.errors import ConfigInvalid
from mooncache.gateway.endpoints import completions
from mooncache.gateway.shell import http_protocol
from mooncache.gateway.shell.exchange import Exchange
from mooncache.runtime import logs
from tests.conditions import WAIT_S, until
from tests.gateway.stand_in import MODEL, Bench, FakeEngine, running

MESSAGES = [{"role": "user", "content": "hi"}]
CHAT: dict[str, Any] = {"model": MODEL, "messages": MESSAGES}
PATH = "/v1/chat/completions"


async def ask(
    bench: Bench, http: aiohttp.ClientSession, body: Any, path: str = PATH, **headers: str
) -> tuple[int, dict[str, Any], Any]:
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    async with http.post(
        bench.url + path, data=io.BytesIO(data) if data else data, headers={**bench.auth(), **headers}
    ) as response:
        text = await response.text()
        return response.status, json.loads(text) if text else {}, response.headers


BAD: list[tuple[str, Any, int, str | None, str]] = [
    (PATH, b"", 400, None, "empty"),
    (PATH, b"{", 400, None, "parse"),
    (PATH, b"[1]", 400, None, "no object"),
    (PATH, b'{"model": "\xff"}', 400, None, "UTF-8"),
    (PATH, b'{"model": "' + MODEL.encode() + b'", "x": "\xc3"}', 400, None, "UTF-8"),
    (PATH, b'{"a":' * 100_000, 400, None, "deep"),
    ("/v1/completions", b'{"model":"m","prompt":' + b"[" * 600 + b"]" * 600 + b"}", 400, "prompt", "deep"),
    (PATH, b'{"model":"m","x":1e999}', 400, None, "too large"),
    (PATH, b'{"model":"m","x":' + b"1" * 5000 + b"}", 400, None, "too large"),
    (PATH, {"messages": MESSAGES}, 400, "model", "missing"),
    (PATH, {"model": 7, "messages": MESSAGES}, 400, "model", "str"),
    (PATH, {"model": "", "messages": MESSAGES}, 400, "model", "length"),
    (PATH, {"model": MODEL}, 400, "messages", "missing"),
    (PATH, {"model": MODEL, "messages": []}, 400, "messages", "length"),
    (PATH, {"model": MODEL, "messages": "hi"}, 400, "messages", "array"),
    (PATH, {"model": MODEL, "messages": ["hi"]}, 400, "messages", "object"),
    (PATH, {**CHAT, "max_tokens": -1}, 400, "max_tokens", ">= 0"),
    (PATH, {**CHAT, "max_completion_tokens": 1 << 40}, 400, "max_completion_tokens", "4294967295"),
    (PATH, {**CHAT, "n": 0}, 400, "n", ">= 1"),
    (PATH, {**CHAT, "n": 100_000}, 400, "n", "128"),
    (PATH, {**CHAT, "n": "2"}, 400, "n", "int"),
    (PATH, {**CHAT, "stream": "yes"}, 400, "stream", "bool"),
    (PATH, {**CHAT, "temperature": "hot"}, 400, "temperature", "str"),
    (PATH, {**CHAT, "stream_options": {"include_usage": 3}}, 400, "stream_options", "bool"),
    (PATH, {**CHAT, "cache_salt": "x" * 2000}, 400, "cache_salt", "length"),
    ("/v1/completions", {"model": MODEL}, 400, "prompt", "missing"),
    ("/v1/completions", {"model": MODEL, "prompt": 3}, 400, "prompt", "string"),
    ("/v1/completions", {"model": MODEL, "prompt": []}, 400, "prompt", "string"),
    ("/v1/completions", {"model": MODEL, "prompt": ["a", 1]}, 400, "prompt", "must not mix kinds of items"),
    ("/v1/completions", {"model": MODEL, "prompt": [1, -1]}, 400, "prompt", ">= 0"),
    ("/v1/completions", {"model": MODEL, "prompt": [[1], []]}, 400, "prompt", "empty"),
    ("/v1/completions", {"model": MODEL, "prompt": ["a"] * 200}, 400, "prompt", "128"),
    (PATH, {"model": "nope", "messages": MESSAGES}, 404, "model", "The model `nope` does not exist."),
]


async def test_bad_bodies_are_refused_before_any_engine(tmp_path: Path, http: aiohttp.ClientSession) -> None:
    async with running(tmp_path, [FakeEngine("e")]) as bench:
        for path, body, status, param, words in BAD:
            found, answer, headers = await ask(bench, http, body, path)
            assert found == status, (body, answer)
            error = answer["error"]
            assert error["param"] == param, (body, error)
            assert words in error["message"], (body, error)
            assert headers["x-should-retry"] == "false"
            assert headers["x-request-id"]
        assert not bench.engines["e"].requests
        assert not bench.conductor.scheduled


async def test_body_beyond_the_limit_is_413(tmp_path: Path, http: aiohttp.ClientSession) -> None:
    async def pieces() -> Any:
        for _ in range(64):
            yield b" " * 1024

    async with running(tmp_path, [FakeEngine("e")], gateway__body_bytes_max=4096) as bench:
        status, answer, _ = await ask(bench, http, b" " * 5000)
        assert (status, answer["error"]["code"]) == (413, "request_too_large")
        # also when nobody said how long it is
        try:
            async with http.post(bench.url + PATH, data=pieces(), headers=bench.auth()) as response:
                assert response.status == 413
        except aiohttp.ClientError:
            pass  # the connection was closed while the client still sent
        status, _, _ = await ask(bench, http, CHAT)
        assert status == 200


async def test_body_that_never_comes_is_408(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(completions, "SILENCE_MAX_S", 0.2)
    async with running(tmp_path, [FakeEngine("e")]) as bench:
        reader, writer = await asyncio.open_connection("127.0.0.1", bench.gateway.http_port)
        head = f"POST {PATH} HTTP/1.1\r\nhost: x\r\ncontent-length: 100\r\nauthorization: Bearer {bench.key()}\r\n\r\n"
        writer.write(head.encode() + b'{"model"')
        assert b"408" in await reader.readline()
        writer.close()


async def test_compressed_body_is_415(tmp_path: Path, http: aiohttp.ClientSession) -> None:
    async with running(tmp_path, [FakeEngine("e")]) as bench:
        status, _, _ = await ask(bench, http, b"x", **{"content-encoding": "gzip"})
        assert status == 415


async def test_who_may_call(tmp_path: Path, http: aiohttp.ClientSession) -> None:
    async with running(tmp_path, [FakeEngine("e")]) as bench:
        cluster = bench.gateway.token.text
        for value, status in (
            ("", 401),
            ("Bearer ", 401),
            ("Bearer sk-wrong", 401),
            ("Basic abc", 401),
            ("Bearer mct1.alice." + "0" * 64, 401),
            ("Bearer " + "x" * 5000, 401),
            (f"Bearer {bench.key()}", 200),
            (f"bearer  {cluster}", 200),
        ):
            headers = {"authorization": value} if value else {}
            async with http.post(bench.url + PATH, json=CHAT, headers=headers) as response:
                assert response.status == status, value
                if status == 401:
                    error = (await response.json())["error"]
                    assert error["code"] == "invalid_api_key"
                    assert error["type"] == "invalid_request_error"
                    assert response.headers["www-authenticate"] == "Bearer"
                    assert "0" * 64 not in error["message"]
        async with http.get(bench.url + "/v1/models") as response:
            assert response.status == 401


def key_file(path: Path, text: str) -> Path:
    path.touch(mode=0o600)
    path.write_text(text)
    return path


async def test_keys_of_the_operators_own(tmp_path: Path, http: aiohttp.ClientSession) -> None:
    def entry(key: str) -> str:
        digest = hashlib.sha256(key.encode()).hexdigest()
        return f'[[key]]\nsha256 = "{digest}"\ntenant = "carol"\nrequests_per_minute = 2\n'

    path = key_file(tmp_path / "keys.toml", entry("sk-one"))
    async with running(tmp_path / "state", [FakeEngine("e")], gateway__keys_file=path) as bench:
        statuses = []
        for _ in range(3):
            status, answer, headers = await ask(bench, http, CHAT, authorization="Bearer sk-one")
            statuses.append(status)
        assert statuses == [200, 200, 429]
        assert answer["error"]["code"] == "rate_limit_exceeded"
        assert int(headers["retry-after"]) >= 1
        assert headers["x-should-retry"] == "true"
        assert headers["x-ratelimit-limit-requests"] == "2"
        assert bench.conductor.scheduled[0].tenant == "carol"
        status, _, _ = await ask(bench, http, CHAT)  # another tenant has a bucket of its own
        assert status == 200
        path.write_text(entry("sk-two") + "# another length\n")
        await until(bench.gateway.state.keyring.refresh)
        status, _, _ = await ask(bench, http, CHAT, authorization="Bearer sk-one")
        assert status == 401
        path.unlink()
        with pytest.raises(ConfigInvalid, match="cannot be read"):  # logged by the duty; the keys stay
            bench.gateway.state.keyring.refresh()
        status, _, _ = await ask(bench, http, CHAT, authorization="Bearer sk-two")
        assert status != 401


async def test_key_file_that_others_may_read(tmp_path: Path) -> None:
    path = tmp_path / "keys.toml"
    path.write_text("")
    path.chmod(0o644)
    with pytest.raises(ConfigInvalid, match="chmod 600"):
        async with running(tmp_path / "state", [], gateway__keys_file=path):
            pass


async def test_tokens_per_minute(tmp_path: Path, http: aiohttp.ClientSession) -> None:
    async with running(tmp_path, [FakeEngine("e", tokens=500)], gateway__tokens_per_minute=100) as bench:
        status, _, _ = await ask(bench, http, CHAT)
        assert status == 200
        await until(lambda: bench.gateway.state.active_count == 0)
        status, answer, headers = await ask(bench, http, CHAT)
        assert status == 429
        assert "tokens" in answer["error"]["message"]
        assert int(headers["retry-after"]) > 100  # 400 tokens over, at 100 a minute
        async with http.post(
            bench.url + PATH, json=CHAT, headers={"authorization": f"Bearer {bench.gateway.token.text}"}
        ) as response:
            assert response.status == 200  # the cluster's own token has no limit


async def test_too_many_at_once_is_429(tmp_path: Path, http: aiohttp.ClientSession) -> None:
    async def hang(_engine: FakeEngine, _request: web.Request, _body: dict[str, Any]) -> Any:
        await asyncio.Event().wait()

    async with running(tmp_path, [FakeEngine("e", behave=hang)], gateway__request_count_max=1) as bench:
        first = asyncio.create_task(ask(bench, http, CHAT))
        await bench.engines["e"].asked.wait()
        status, answer, headers = await ask(bench, http, CHAT)
        assert (status, answer["error"]["code"]) == (429, "too_many_requests")
        assert headers["retry-after"] == "1"
        first.cancel()
        await until(lambda: bench.gateway.state.active_count == 0)


async def test_body_that_comes_drop_by_drop_is_given_up(tmp_path: Path) -> None:
    async with running(tmp_path, [FakeEngine("e")], gateway__request_timeout_s=0.3) as bench:
        reader, writer = await asyncio.open_connection("127.0.0.1", bench.gateway.http_port)
        head = f"POST {PATH} HTTP/1.1\r\nhost: x\r\ncontent-length: 100\r\n"
        writer.write(f"{head}authorization: Bearer {bench.key()}\r\n\r\n{{".encode())
        async with asyncio.timeout(WAIT_S):
            assert b" 408 " in await reader.readline()
        await until(lambda: bench.gateway.state.active_count == 0)
        writer.transport.abort()


async def engine_says(status: int, body: Any) -> Any:
    async def behave(_engine: FakeEngine, _request: web.Request, _body: dict[str, Any]) -> Any:
        return web.json_response(body, status=status)

    return behave


@pytest.mark.parametrize(
    ("said", "body", "status", "message"),
    [
        (400, {"error": {"message": "bad top_p", "type": "Bad", "param": "top_p", "code": 400}}, 400, "bad top_p"),
        (400, {"object": "error", "message": "flat", "type": "BadRequest", "param": None, "code": 400}, 400, "flat"),
        (422, {"detail": "odd"}, 422, "odd"),
        (401, {"error": "no"}, 502, "401"),
        (404, {"error": {"message": "no such model"}}, 502, "404"),
        (429, {"error": {"message": "queue full"}}, 429, "Come back after the time in Retry-After"),
        (500, {"error": {"message": "boom"}}, 502, "boom"),
        (503, {"error": {"message": "loading"}}, 503, "loading"),
    ],
)  # fmt: skip
async def test_refusals_of_an_engine(
    tmp_path: Path, http: aiohttp.ClientSession, said: int, body: Any, status: int, message: str
) -> None:
    engine = FakeEngine("e", behave=await engine_says(said, body))
    async with running(tmp_path, [engine]) as bench:
        found, answer, _ = await ask(bench, http, CHAT)
        assert found == status
        assert message in answer["error"]["message"]
        assert set(answer["error"]) == {"message", "type", "param", "code"}
        assert len(engine.requests) == (1 if said in (400, 422) else 3)


async def test_answer_that_is_no_json_is_502(tmp_path: Path, http: aiohttp.ClientSession) -> None:
    async def garbage(_engine: FakeEngine, _request: web.Request, _body: dict[str, Any]) -> Any:
        return web.Response(body=b"\xff\xfe", content_type="application/json")

    async with running(tmp_path, [FakeEngine("e", behave=garbage)]) as bench:
        status, answer, _ = await ask(bench, http, CHAT)
        assert (status, answer["error"]["code"]) == (502, "engine_failed")


async def test_connection_that_the_engine_closed_while_idle_is_opened_again(
    tmp_path: Path, http: aiohttp.ClientSession
) -> None:
    """An engine that closes each connection without an answer once, as at the end of keep-alive."""
    seen = []

    async def first_time_closes(engine: FakeEngine, request: web.Request, body: dict[str, Any]) -> Any:
        from tests.gateway.stand_in import good

        seen.append(request)
        if len(seen) == 1:
            assert request.transport is not None
            request.transport.close()
            await asyncio.sleep(0.05)
        return await good(engine, request, body)

    async with running(tmp_path, [FakeEngine("e", behave=first_time_closes)]) as bench:
        status, _, _ = await ask(bench, http, CHAT)
        assert status == 200
        assert len(bench.conductor.scheduled) == 1  # the same instance, not another


async def test_paths_methods_and_slashes(tmp_path: Path, http: aiohttp.ClientSession) -> None:
    async with running(tmp_path, [FakeEngine("e")], instance={"model": "org/name"}) as bench:
        for method, path, status in (
            ("GET", "/v1/models/", 200),
            ("HEAD", "/v1/models", 200),
            ("GET", "/v1/models/org/name", 200),
            ("GET", "/v1/models/org/name/", 200),
            ("GET", "/v1/models/org%2Fname", 200),
            ("GET", "/v1/models/other", 404),
            ("GET", "/health", 200),
            ("GET", "/metrics", 200),
            ("GET", "/openapi.json", 200),
            ("GET", PATH, 405),
            ("DELETE", "/v1/models", 405),
            ("POST", "/v1/embeddings", 404),
            ("POST", "/v1/responses", 404),
            ("GET", "/", 404),
            ("OPTIONS", PATH, 204),
        ):
            async with http.request(method, bench.url + path, headers=bench.auth()) as response:
                assert response.status == status, (method, path)
                assert "x-request-id" in response.headers
                if status >= 400:
                    assert (await response.json())["error"]["message"]
        status, _, _ = await ask(bench, http, {**CHAT, "model": "org/name"}, PATH + "/")
        assert status == 200


async def test_cross_origin(tmp_path: Path, http: aiohttp.ClientSession) -> None:
    origins = "https://ui.example"
    async with running(tmp_path, [FakeEngine("e")], gateway__cors_origins=origins) as bench:
        asked = {
            "access-control-request-method": "POST",
            "access-control-request-headers": "authorization,x-a",
        }
        async with http.options(bench.url + PATH, headers={"origin": origins, **asked}) as response:
            assert response.status == 204
            assert response.headers["access-control-allow-origin"] == origins
            assert response.headers["access-control-allow-headers"] == "authorization,x-a"
        async with http.options(bench.url + PATH, headers={"origin": "https://other", **asked}) as response:
            assert "access-control-allow-origin" not in response.headers
        status, _, headers = await ask(bench, http, CHAT, origin=origins)
        assert status == 200 and headers["access-control-allow-origin"] == origins
        status, _, headers = await ask(bench, http, b"{", origin=origins)
        assert status == 400 and headers["access-control-allow-origin"] == origins


async def test_request_ids_that_are_no_ids_are_replaced(tmp_path: Path, http: aiohttp.ClientSession) -> None:
    async with running(tmp_path, [FakeEngine("e")]) as bench:
        for given, kept in (("abc-1.2:3_", True), ("x" * 65, False), ("a b", False), ('"', False)):
            _, _, headers = await ask(bench, http, CHAT, **{"x-request-id": given})
            assert (headers["x-request-id"] == given) is kept
            assert bench.engines["e"].headers[-1]["x-request-id"] == headers["x-request-id"]


async def test_trace_context_goes_on(tmp_path: Path, http: aiohttp.ClientSession) -> None:
    trace = "0af7651916cd43dd8448eb211c80319c"
    async with running(tmp_path, [FakeEngine("e")]) as bench:
        await ask(bench, http, CHAT, traceparent=f"00-{trace}-b7ad6b7169203331-01")
        assert bench.engines["e"].headers[0]["traceparent"].split("-")[1] == trace


async def test_defect_is_a_500_without_details(
    tmp_path: Path, http: aiohttp.ClientSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def fails(_self: Exchange, _limit: int, _timeout_s: float) -> bytes:
        raise ZeroDivisionError("inner detail")

    async with running(tmp_path, [FakeEngine("e")]) as bench:
        monkeypatch.setattr(Exchange, "read_body", fails)
        status, answer, _ = await ask(bench, http, CHAT)
        assert status == 500
        assert "inner detail" not in json.dumps(answer)


async def test_large_bodies(tmp_path: Path, http: aiohttp.ClientSession) -> None:
    async with running(tmp_path, [FakeEngine("e")], instance={"max_model_tokens": 1 << 20}) as bench:
        tokens = list(range(100_000))
        status, _, _ = await ask(bench, http, {"model": MODEL, "prompt": tokens}, "/v1/completions")
        assert status == 200
        assert bench.engines["e"].requests[-1]["prompt"] == tokens
        content = [{"type": "image_url", "image_url": {"url": "data:image/png;base64," + "A" * (4 << 20)}}]
        message = {"role": "user", "content": content}
        status, _, _ = await ask(bench, http, {"model": MODEL, "messages": [message]})
        assert status == 200
        assert bench.engines["e"].requests[-1]["messages"] == [message]


async def test_port_that_is_taken(tmp_path: Path) -> None:
    async with running(tmp_path / "a", []) as bench:
        with pytest.raises(ConfigInvalid, match="Choose another port"):
            async with running(tmp_path / "b", [], gateway__port=bench.gateway.http_port):
                pass


async def test_head_that_is_too_large_or_never_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_protocol, "HEAD_TIMEOUT_S", 0.2)
    async with running(tmp_path, [FakeEngine("e")]) as bench:
        for data in (b"", b"GET /health HT", b"GET /health HTTP/1.1\r\nx: y\r\n"):
            reader, writer = await asyncio.open_connection("127.0.0.1", bench.gateway.http_port)
            writer.write(data)
            assert await reader.read() == b""  # closed by the gateway
            writer.close()
        reader, writer = await asyncio.open_connection("127.0.0.1", bench.gateway.http_port)
        writer.write(b"GET /health HTTP/1.1\r\n" + b"x: " + b"y" * 70_000 + b"\r\n\r\n")
        assert b" 400 " in await reader.readline()
        writer.close()


async def test_idle_connections_do_not_pile_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_protocol, "IDLE_COUNT_MAX", 2)
    async with running(tmp_path, [FakeEngine("e")]) as bench:
        opened = []
        for _ in range(4):
            reader, writer = await asyncio.open_connection("127.0.0.1", bench.gateway.http_port)
            opened.append((reader, writer))
            writer.write(b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n")
            assert b" 200 " in await reader.readline()
        async with asyncio.timeout(WAIT_S):
            for reader, _ in opened[:2]:
                await reader.read()  # ends: the gateway closed the two that were idle longest
        for reader, writer in opened[2:]:
            writer.write(b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n")
            while b" 200 " not in await reader.readline():
                assert not reader.at_eof()
        for _, writer in opened:
            writer.close()


async def test_a_client_that_leaves_at_the_end_is_charged(
    tmp_path: Path, http: aiohttp.ClientSession
) -> None:
    async def hang(_engine: FakeEngine, _request: web.Request, _body: dict[str, Any]) -> Any:
        await asyncio.Event().wait()

    async with running(tmp_path, [FakeEngine("e", behave=hang)]) as bench:
        for _ in range(200):
            bench.gateway.state.paces.learn(
                MODEL, 1_000_000, 0.0, 0
            )  # whatever it took was long enough for a token
        call = asyncio.create_task(ask(bench, http, {**CHAT, "max_tokens": 1}))
        await bench.engines["e"].asked.wait()
        call.cancel()
        await until(lambda: bench.gateway.state.active_count == 0)
        page = bench.gateway.metrics.render().decode()
        assert f'output_tokens_total{{model="{MODEL}"}} 1.0' in page


async def test_log_line_of_a_request_tells_what_it_was(tmp_path: Path, http: aiohttp.ClientSession) -> None:
    stream = io.StringIO()
    logs.setup("gateway", log_format="json", stream=stream)
    try:
        async with running(tmp_path, [FakeEngine("e", cached_tokens=16)]) as bench:
            await ask(bench, http, CHAT, **{"x-request-id": "id-7"})
    finally:
        logs.reset()
    lines = [json.loads(line) for line in stream.getvalue().splitlines()]
    (found,) = [line for line in lines if line["event"] == "http.finished" and line["status"] == 200]
    assert found["request_id"] == "id-7" and found["tenant"] == "alice" and found["model"] == MODEL
    assert (found["cached_tokens"], found["output_tokens"]) == (16, 3)
    assert found["instances"] == ["decode:e:OK"]
    assert all(key not in stream.getvalue() for key in ("mct1.", "mcc1.", "mce1."))
