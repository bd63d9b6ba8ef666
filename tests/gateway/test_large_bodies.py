"""Bodies that are large or many: who reads them, who waits for whom, and what is refused before it costs anything."""

from __future__ import annotations

import asyncio
import io
import json
import os
import signal
from pathlib import Path
from typing import Any

import aiohttp
from aiohttp import web
from hypothesis import given
from hypothesis import strategies as st

from mooncache.auth import cache_salt
from mooncache.gateway.core import body
from mooncache.gateway.core.bodies import Budget, FairQueue
from mooncache.gateway.tokens import PromptReader
from mooncache.kvcache.keys import request_keys
from tests.conditions import WAIT_S, until
from tests.gateway.model_folder import instance_fields, passport_of
from tests.gateway.stand_in import MODEL, Bench, FakeEngine, begin, chunk, good, running, send
from tests.processes import freeze

PATH = "/v1/completions"
LARGE = {"model": MODEL, "prompt": "word " * 80_000}  # 400 kB
SMALL = {"model": MODEL, "prompt": "word"}
LONG = {"max_model_tokens": 1 << 20}


async def ask(
    bench: Bench, http: aiohttp.ClientSession, data: Any, tenant: str = "alice", *, path: str = PATH
) -> tuple[int, Any]:
    content = io.BytesIO(json.dumps(data).encode())
    headers = bench.auth(tenant) | {"content-type": "application/json"}
    async with http.post(bench.url + path, data=content, headers=headers) as response:
        return response.status, await response.json()


async def hang(_engine: FakeEngine, _request: web.Request, _body: dict[str, Any]) -> Any:
    await asyncio.Event().wait()


async def test_a_large_body_has_the_tokens_and_keys_of_a_small_one(
    tmp_path: Path, tokenizer_folder: Path, http: aiohttp.ClientSession
) -> None:
    fields = instance_fields(tokenizer_folder) | LONG
    async with running(tmp_path, [FakeEngine("e")], instance=fields) as bench:
        readers = bench.gateway.state.tokenizers
        await until(lambda: any(entry.reader for entry in readers._entries.values()))
        here = PromptReader.load(tokenizer_folder)
        assert here is not None
        for data in (SMALL, LARGE, {**LARGE, "prompt": list(LARGE["prompt"].encode())}):
            assert (await ask(bench, http, data))[0] == 200
            asked = bench.conductor.scheduled[-1]
            prompt = here.read(data, False)
            assert prompt is not None
            assert asked.prompt_tokens == prompt.token_count
            salt = cache_salt(bench.gateway.token, "alice", "")
            keys = request_keys(passport_of(tokenizer_folder), prompt.token_ids[0], salt=salt)
            assert asked.keys == keys
            sent = bench.engines["e"].requests[-1]
            assert sent["prompt"] == data["prompt"]
            assert sent["cache_salt"] == salt


async def test_what_the_pool_has_of_a_prompt_with_an_image_is_not_predicted(
    tmp_path: Path, tokenizer_folder: Path, http: aiohttp.ClientSession
) -> None:
    fields = instance_fields(tokenizer_folder) | LONG
    async with running(tmp_path, [FakeEngine("e")], instance=fields) as bench:
        readers = bench.gateway.state.tokenizers
        await until(lambda: any(entry.reader for entry in readers._entries.values()))
        image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
        for parts, predicted in (([], True), ([image], False)):
            content = [{"type": "text", "text": "word " * 200}, *parts]
            asked = {"model": MODEL, "messages": [{"role": "user", "content": content}]}
            assert (await ask(bench, http, asked, path="/v1/chat/completions"))[0] == 200
            assert bool(bench.conductor.scheduled[-1].keys) is predicted
            assert bench.engines["e"].requests[-1]["messages"] == asked["messages"]


async def test_a_large_body_that_takes_long_holds_up_nobody_else(
    tmp_path: Path, http: aiohttp.ClientSession
) -> None:
    async with running(tmp_path, [FakeEngine("e")], instance=LONG) as bench:
        assert (await ask(bench, http, LARGE))[0] == 200
        (pid,) = bench.gateway.state.preparing.pids
        freeze(pid)
        waiting = asyncio.create_task(ask(bench, http, LARGE))
        await until(lambda: bench.gateway.state.bodies.bytes > 0)
        assert (await ask(bench, http, SMALL, "bob"))[0] == 200
        assert not waiting.done()
        os.kill(pid, signal.SIGCONT)
        assert (await waiting)[0] == 200
        assert bench.gateway.state.bodies.bytes == 0


async def test_a_body_that_cannot_be_read_in_time_costs_its_own_request_only(
    tmp_path: Path, http: aiohttp.ClientSession
) -> None:
    async with running(tmp_path, [FakeEngine("e")], instance=LONG) as bench:
        assert (await ask(bench, http, LARGE))[0] == 200
        preparing = bench.gateway.state.preparing
        preparing._timeout_s = 0.5
        (pid,) = preparing.pids
        freeze(pid)
        status, answer = await ask(bench, http, LARGE)
        assert (status, answer["error"]["code"]) == (504, "timeout")
        preparing._timeout_s = 60.0
        assert (await ask(bench, http, LARGE))[0] == 200
        assert preparing.pids != [pid]
        os.kill(preparing.pids[0], signal.SIGKILL)
        statuses = {(await ask(bench, http, LARGE))[0] for _ in range(2)}
        assert statuses <= {200, 500}
        assert (await ask(bench, http, LARGE))[0] == 200
    assert not preparing.pids


async def test_large_bodies_that_are_wrong_are_refused_in_the_same_words(
    tmp_path: Path, http: aiohttp.ClientSession
) -> None:
    async with running(tmp_path, [FakeEngine("e")], instance=LONG | {"max_model_tokens": 100_000}) as bench:
        url, headers = bench.url + PATH, bench.auth()
        for data, code in (
            (b"[" + b"1," * 200_000 + b"1]", "invalid_value"),
            (b'{"model": "%b"' % MODEL.encode() + b" " * 300_000, "invalid_value"),
            (json.dumps({"prompt": "x" * 300_000}).encode(), "invalid_value"),
            (json.dumps({**LARGE, "model": "other"}).encode(), "model_not_found"),
            (json.dumps({**LARGE, "prompt": [1] * 150_000}).encode(), "context_length_exceeded"),
        ):
            async with http.post(url, data=data, headers=headers) as response:
                assert (await response.json())["error"]["code"] == code
        assert not bench.engines["e"].requests


async def test_the_limit_of_a_body_follows_the_models_length(
    tmp_path: Path, http: aiohttp.ClientSession
) -> None:
    async with running(tmp_path, [FakeEngine("e")], instance={"max_model_tokens": 4096}) as bench:
        limit = body.bytes_max(64 << 20, 16, 4096)
        head = {"authorization": f"Bearer {bench.key()}", "content-length": str(limit + 1)}
        reader, writer = await asyncio.open_connection("127.0.0.1", bench.gateway.http_port)
        lines = "".join(f"{name}: {value}\r\n" for name, value in head.items())
        writer.write(f"POST {PATH} HTTP/1.1\r\nhost: x\r\n{lines}\r\n".encode())  # and no body at all
        async with asyncio.timeout(WAIT_S):
            assert b" 413 " in await reader.readline()
        writer.close()
    assert body.bytes_max(64 << 20, 16, 0) == 64 << 20
    assert body.bytes_max(1024, 16, 4096) == 1024


async def test_bodies_under_way_leave_room_for_other_tenants(
    tmp_path: Path, http: aiohttp.ClientSession
) -> None:
    engines = [FakeEngine("e", behave=hang)]
    async with running(tmp_path, engines, gateway__tenant_body_bytes_max=5000) as bench:
        data = {**SMALL, "prompt": "x" * 3000}
        first = asyncio.create_task(ask(bench, http, data))
        await engines[0].asked.wait()
        status, answer = await ask(bench, http, data)
        assert (status, answer["error"]["code"]) == (429, "too_many_requests")
        engines[0].behave = good
        assert (await ask(bench, http, data, "bob"))[0] == 200
        first.cancel()
        await until(lambda: bench.gateway.state.bodies.bytes == 0)
        assert (await ask(bench, http, data))[0] == 200
        bench.gateway.state.bodies.check()


async def test_a_stream_that_has_begun_holds_nothing_of_its_body(
    tmp_path: Path, http: aiohttp.ClientSession
) -> None:
    more = asyncio.Event()

    async def slow(_engine: FakeEngine, request: web.Request, _body: dict[str, Any]) -> Any:
        response = await begin(request)
        await send(response, chunk("t0"))
        await more.wait()
        await response.write(b"data: [DONE]\n\n")
        return response

    async with running(tmp_path, [FakeEngine("e", behave=slow)]) as bench:
        data = {**SMALL, "stream": True}
        async with http.post(bench.url + PATH, json=data, headers=bench.auth()) as response:
            await response.content.readany()
            assert bench.gateway.state.active_count == 1
            assert bench.gateway.state.bodies.bytes == 0
            more.set()
            assert b"[DONE]" in await response.read()


async def test_one_tenant_cannot_have_all_places(tmp_path: Path, http: aiohttp.ClientSession) -> None:
    engines = [FakeEngine("e", behave=hang)]
    async with running(tmp_path, engines, gateway__tenant_request_count_max=1) as bench:
        first = asyncio.create_task(ask(bench, http, SMALL))
        await engines[0].asked.wait()
        status, answer = await ask(bench, http, SMALL)
        assert (status, answer["error"]["code"]) == (429, "too_many_requests")
        engines[0].behave = good
        assert (await ask(bench, http, SMALL, "bob"))[0] == 200
        first.cancel()
        await until(lambda: not bench.gateway.state.tenant_counts)
        assert (await ask(bench, http, SMALL))[0] == 200


@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 60)), max_size=40), st.randoms())
def test_no_tenant_holds_more_than_its_share(steps: list[tuple[str, int]], random: Any) -> None:
    budget, held = Budget(100, 60), []
    for tenant, size in steps:
        if not budget.take(tenant, size):
            held.append((tenant, size))
        budget.check()
        if held and random.random() < 0.5:
            budget.give(*held.pop(random.randrange(len(held))))
    for step in held:
        budget.give(*step)
    budget.check()
    assert budget.bytes == 0


def test_tenants_take_turns() -> None:
    queue: FairQueue[str] = FairQueue(5)
    for item in ("a1", "a2", "a3", "b1", "c1"):
        assert queue.put(item[0], item)
    assert not queue.put("d", "d1")
    queue.remove("a", "a2")
    queue.remove("x", "x1")
    assert [queue.get() for _ in range(5)] == ["a1", "b1", "c1", "a3", None]
    assert len(queue) == 0
