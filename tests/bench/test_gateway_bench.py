"""The gateway's benchmark runs over very little data and its rows are whole; the null engine answers as engines do."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator

import aiohttp
import pytest

from mooncache.bench.gateway import CASES, GatewayBenchOptions, run
from mooncache.bench.null_engine import NullEngine, NullEngineOptions
from tests.conditions import WAIT_S

TINY = GatewayBenchOptions(
    short_tokens=50,
    long_tokens=2000,
    added_tokens=100,
    requests=8,
    long_requests=1,
    streams=2,
    stream_events=20,
    paced_streams=2,
    paced_events_per_s=200,
    paced_events=10,
)


@pytest.mark.slow
def test_every_case_gives_rows() -> None:
    reported: list[str] = []
    report = run(TINY, reported.append)
    assert len(report.rows) > 20
    assert len(reported) >= len(CASES)
    assert {row.met for row in report.rows} >= {None}
    assert sum(row.bar is not None for row in report.rows) == 9


def test_tokens_alone() -> None:
    report = run(TINY, lambda _: None, only=("tokens",))
    assert [row.unit for row in report.rows] == ["ms"] * 4


@pytest.fixture
async def engine() -> AsyncIterator[NullEngine]:
    engine = NullEngine(NullEngineOptions(model="m", key="k"))
    await engine.start()
    yield engine
    await engine.close()


@pytest.fixture
async def session(engine: NullEngine) -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession(
        f"http://127.0.0.1:{engine.port}",
        headers={"authorization": "Bearer k"},
        timeout=aiohttp.ClientTimeout(total=30),
    ) as session:
        yield session


async def test_a_whole_answer(engine: NullEngine, session: aiohttp.ClientSession) -> None:
    body = {"model": "m", "messages": [{"role": "user", "content": "x" * 40}], "max_tokens": 3}
    async with session.post("/v1/chat/completions", json=body, headers={"x-request-id": "r1"}) as response:
        answer = await response.json()
        assert (response.status, response.headers["x-request-id"]) == (200, "r1")
    assert answer["choices"][0]["message"]["content"] == " tok tok tok"
    assert answer["usage"]["completion_tokens"] == 3
    assert engine.bodies[-1] == body


async def test_a_body_in_chunks(engine: NullEngine, session: aiohttp.ClientSession) -> None:
    async def pieces() -> AsyncIterator[bytes]:
        yield b'{"model": "m", "messages": [], "stream": true, "note": "0\\r\\n", '
        yield b'"stream_options": {"include_usage": true}, "null_usage": false, "max_tokens": 2}'

    async with session.post("/v1/chat/completions", data=pieces()) as response:
        text = await response.text()
    assert engine.bodies[-1]["note"] == "0\r\n"
    assert text.endswith("data: [DONE]\n\n") and "usage" not in text
    async with session.post("/v1/chat/completions", json={"messages": [], "max_tokens": 1}) as response:
        assert response.status == 200, "the connection goes on"


@pytest.mark.parametrize(("path", "field"), [("chat/completions", "delta"), ("completions", "text")])
async def test_a_stream(session: aiohttp.ClientSession, path: str, field: str) -> None:
    body = {
        "prompt": [1, 2],
        "messages": [],
        "stream": True,
        "max_tokens": 4,
        "stream_options": {"include_usage": True},
    }
    async with session.post(f"/v1/{path}", json=body) as response:
        events = (await response.text()).removesuffix("\n\n").split("\n\n")
    assert events[-1] == "data: [DONE]"
    chunks = [json.loads(event.removeprefix("data: ")) for event in events[:-1]]
    assert chunks[-1]["usage"]["completion_tokens"] == 4
    assert chunks[-2]["choices"][0]["finish_reason"] == "length"
    said = [chunk["choices"][0][field] for chunk in chunks[:-1]]
    assert [one for one in said if one in (" tok", {"content": " tok"})] == said[-5:-1]


@pytest.mark.parametrize(
    ("path", "body", "status"),
    [("/v1/chat/completions", "{", 400), ("/v1/embeddings", "{}", 404), ("/v1/completions", "[]", 400)],
)
async def test_refusals(session: aiohttp.ClientSession, path: str, body: str, status: int) -> None:
    async with session.post(path, data=body) as response:
        assert response.status == status
        assert "error" in await response.json()


async def test_a_wrong_key(session: aiohttp.ClientSession) -> None:
    async with session.get("/v1/models", headers={"authorization": "Bearer x"}) as response:
        assert response.status == 401
    async with session.get("/health", headers={"authorization": "Bearer x"}) as response:
        assert response.status == 200


async def test_a_client_that_leaves_ends_its_stream(
    engine: NullEngine, session: aiohttp.ClientSession
) -> None:
    body = {"prompt": "x", "stream": True, "max_tokens": 1_000_000, "null_events_per_s": 1000}
    async with session.post("/v1/completions", json=body) as response:
        await response.content.readuntil(b"\n\n")
        response.close()
    async with asyncio.timeout(WAIT_S):
        await engine.idle.wait()
    assert engine.aborted_count == 1
