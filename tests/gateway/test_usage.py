"""What a gateway meters: as many tokens as engines counted, on streams, errors, clients that leave, and batches."""

from __future__ import annotations

import asyncio
import itertools
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from mooncache.accounts.core.usage import HOUR_S, UsageCounts, UsageField
from mooncache.accounts.usage_store import FILE_NAME, UsageStore
from mooncache.errors import ConfigInvalid
from mooncache.proto.v1 import conductor_pb2 as pb
from tests.conditions import until
from tests.gateway.stand_in import MODEL, Bench, FakeEngine, begin, chunk, good, running, send
from tests.gateway.test_batches import client_of, ended, jsonl, line, submit
from tests.gateway.test_two_legs import two_legs

CHAT = "/v1/chat/completions"
BODY: dict[str, Any] = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}], "max_tokens": 50}


async def ask(bench: Bench, http: aiohttp.ClientSession, tenant: str = "alice", **changes: Any) -> int:
    async with http.post(bench.url + CHAT, json={**BODY, **changes}, headers=bench.auth(tenant)) as response:
        await response.read()
        return response.status


async def used(bench: Bench, *by: UsageField) -> dict[Any, UsageCounts]:
    """What is in the file once the gateway has written all that it counted."""
    await until(lambda: not bench.gateway.state.active_count)
    meter = bench.gateway.state.meter
    assert meter is not None
    await meter.flush()
    with UsageStore(bench.gateway.config.cluster.accounts_place) as store:
        return {each.values: each.counts for each in store.sums(by)}


class Tally:
    """An engine's behaviour: other numbers for each request, and how much it has counted in all its answers."""

    def __init__(self) -> None:
        self.counts = UsageCounts()
        self._numbers = itertools.count(1)

    async def __call__(self, engine: FakeEngine, request: web.Request, body: dict[str, Any]) -> Any:
        number = next(self._numbers)
        engine.prompt_tokens, engine.cached_tokens, engine.tokens = 30 + number, number % 7, 1 + number % 5
        counts = UsageCounts(1, 0, 0, engine.prompt_tokens, engine.cached_tokens, engine.tokens)
        answer = await good(engine, request, body)
        self.counts.add(counts)
        return answer


async def test_tokens_are_those_that_the_engine_counted(tmp_path: Path, http: aiohttp.ClientSession) -> None:
    tally = Tally()
    async with running(tmp_path, [FakeEngine("e", behave=tally)]) as bench:
        for number in range(12):
            stream = number % 2 == 0
            options = {"stream_options": {"include_usage": True}} if number % 4 == 0 else {}
            assert await ask(bench, http, f"t{number % 3}", stream=stream, **options) == 200
        found = await used(bench)
        assert found[()] == tally.counts
        by = await used(bench, UsageField.TENANT, UsageField.KEY, UsageField.MODEL, UsageField.CLASS)
        assert set(by) == {(f"t{number}", "token", MODEL, "online") for number in range(3)}
        page = bench.gateway.metrics.render().decode()
    assert 'mooncache_gateway_tenant_requests_total{outcome="answered",tenant="t0"} 4.0' in page
    assert "mooncache_gateway_usage_rows_unwritten 0.0" in page
    for tenant in range(3):
        output = by[f"t{tenant}", "token", MODEL, "online"].output_tokens
        assert f'tenant_tokens_total{{kind="output",tenant="t{tenant}"}} {output:.1f}' in page


@pytest.mark.parametrize("stream", [False, True])
async def test_a_prefill_leg_is_not_counted_twice(
    tmp_path: Path, tokenizer_folder: Path, http: aiohttp.ClientSession, stream: bool
) -> None:
    async with two_legs(tmp_path, tokenizer_folder) as bench:
        assert await ask(bench, http, stream=stream) == 200
        assert (await used(bench))[()] == UsageCounts(1, 0, 0, 40, 32, 3, 0)


async def test_a_client_that_leaves(tmp_path: Path, http: aiohttp.ClientSession) -> None:
    """The engine's own sum does not come: what was sent until then is counted, and said to be an estimate."""
    ready = asyncio.Event()

    async def slow(_engine: FakeEngine, request: web.Request, _body: dict[str, Any]) -> Any:
        response = await begin(request)
        for number in range(7):
            await send(response, chunk(f"t{number} "))
        ready.set()
        await asyncio.Event().wait()

    async with running(tmp_path, [FakeEngine("e", behave=slow)]) as bench:
        async with http.post(
            bench.url + CHAT, json={**BODY, "stream": True}, headers=bench.auth()
        ) as response:
            await ready.wait()
            text = b""
            while text.count(b"\n\n") < 7:
                text += await response.content.readany()
        counts = (await used(bench))[()]
        assert (counts.requests, counts.cancelled, counts.failed) == (1, 1, 0)
        assert counts.output_tokens == 7 and counts.input_tokens > 0
        assert counts.estimated_tokens == counts.input_tokens + counts.output_tokens


async def broken(_engine: FakeEngine, request: web.Request, _body: dict[str, Any]) -> Any:
    response = await begin(request)
    await send(response, chunk("one"))
    assert request.transport is not None
    request.transport.abort()
    return response


async def refuses(_engine: FakeEngine, _request: web.Request, _body: dict[str, Any]) -> Any:
    return web.json_response({"error": {"message": "no"}}, status=500)


async def test_errors(tmp_path: Path, http: aiohttp.ClientSession) -> None:
    async with running(tmp_path, [FakeEngine("e", behave=refuses)]) as bench:
        assert await ask(bench, http) >= 500
        assert (await used(bench))[()] == UsageCounts(1, 1), "what no engine answered costs nothing"
        bench.engines["e"].behave = broken
        assert await ask(bench, http, stream=True) == 200
        counts = (await used(bench))[()]
        assert (counts.requests, counts.failed, counts.output_tokens) == (2, 2, 1)
        assert counts.estimated_tokens == counts.input_tokens + counts.output_tokens
        before = counts
        assert await ask(bench, http, model="no-such-model") == 404
        assert await ask(bench, http, max_tokens=-1) == 400
        refused = pb.ScheduleResponse(admitted=False, reason=pb.ADMISSION_REASON_TTFT)
        bench.conductor.plans = [refused]
        assert await ask(bench, http) == 429
        assert (await used(bench))[()] == before, "what no instance was asked is not metered"


async def test_an_engine_that_lies_breaks_no_sum(tmp_path: Path, http: aiohttp.ClientSession) -> None:
    engine = FakeEngine("e", tokens=3, cached_tokens=10**25)
    async with running(tmp_path, [engine]) as bench:
        engine.prompt_tokens = 10**30
        assert await ask(bench, http) == 200
        counts = (await used(bench))[()]
        assert counts.input_tokens == counts.cached_tokens == 1 << 40


async def test_batches(tmp_path: Path, http: aiohttp.ClientSession) -> None:
    """Offline work is counted apart, under the key that began the batch; what was tried again counts as often."""
    tally, tries = Tally(), itertools.count()

    async def first_fails(engine: FakeEngine, request: web.Request, body: dict[str, Any]) -> Any:
        return await (broken if next(tries) == 0 else tally)(engine, request, body)

    async with running(
        tmp_path, [FakeEngine("e", behave=first_fails)], gateway__batch_dir=tmp_path / "batches"
    ) as bench:
        async with client_of(bench) as client:
            begun = await submit(client, jsonl(line("a", "a"), line("b", "b"), line("c", "c")))
            assert (await ended(client, begun.id)).status == "completed"
        assert await ask(bench, http) == 200
        by = await used(bench, UsageField.CLASS, UsageField.KEY)
        offline = by["offline", "token"]
        assert (offline.requests, offline.failed) == (4, 1)
        assert by["online", "token"].requests == 1
        exact = UsageCounts()
        for counts in by.values():
            exact.add(counts)
        assert exact.input_tokens + exact.output_tokens - exact.estimated_tokens == (
            tally.counts.input_tokens + tally.counts.output_tokens
        )


async def test_a_full_disk_stops_no_request(
    tmp_path: Path, http: aiohttp.ClientSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any) -> bool:
        raise ConfigInvalid("The file of usage cannot be used: database or disk is full.")

    async with running(tmp_path, [FakeEngine("e")]) as bench:
        with monkeypatch.context() as patched:
            patched.setattr(UsageStore, "add", full)
            for _ in range(3):
                assert await ask(bench, http) == 200
            with pytest.raises(ConfigInvalid, match="full"):
                await used(bench)
            assert await ask(bench, http) == 200
            page = bench.gateway.metrics.render().decode()
            assert "mooncache_gateway_usage_rows_unwritten 2.0" in page
        assert (await used(bench))[()].requests == 4, "what was counted meanwhile is lost"


async def test_the_end_of_a_gateway_writes_the_rest(tmp_path: Path, http: aiohttp.ClientSession) -> None:
    async with running(tmp_path, [FakeEngine("e")]) as bench:
        assert await ask(bench, http) == 200
        folder = bench.gateway.config.cluster.accounts_place
    with UsageStore(folder) as store:
        (found,) = store.sums((UsageField.HOUR,))
        assert found.counts.requests == 1 and int(found.values[0]) % HOUR_S == 0


async def test_a_gateway_that_ends_at_once_loses_what_it_had_not_written(
    tmp_path: Path, http: aiohttp.ClientSession
) -> None:
    """Its process ends without a last word: what was written is there once, and the next process adds to it."""
    accounts = {"cluster__accounts_dir": tmp_path / "accounts"}
    async with running(tmp_path / "a", [FakeEngine("e")], **accounts) as bench:
        assert await ask(bench, http) == 200
        assert (await used(bench))[()].requests == 1
        assert await ask(bench, http) == 200
        bench.gateway.state.meter = None
    async with running(tmp_path / "b", [FakeEngine("e")], **accounts) as bench:
        assert await ask(bench, http) == 200
        assert 2 <= (await used(bench))[()].requests <= 3


async def test_two_gateways_share_the_file(tmp_path: Path, http: aiohttp.ClientSession) -> None:
    accounts = {"cluster__accounts_dir": tmp_path / "accounts"}
    async with (
        running(tmp_path / "a", [FakeEngine("e")], **accounts) as one,
        running(tmp_path / "b", [FakeEngine("e")], **accounts) as other,
    ):
        for _ in range(5):
            assert await ask(one, http) == await ask(other, http) == 200
        await asyncio.gather(used(one), used(other))
        assert (await used(one))[()].requests == 10


async def test_metering_can_be_switched_off(tmp_path: Path, http: aiohttp.ClientSession) -> None:
    async with running(tmp_path, [FakeEngine("e")], gateway__usage_enabled=False) as bench:
        assert await ask(bench, http) == 200
        assert not (bench.gateway.config.cluster.accounts_place / FILE_NAME).exists()
