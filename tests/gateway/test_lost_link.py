"""A link between gateway and engine that passes nothing any more, of which neither end learns."""

from __future__ import annotations

import asyncio
import contextlib
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from mooncache.gateway.shell import engines as calls
from tests.conditions import WAIT_S
from tests.gateway.stand_in import FakeEngine, begin, chunk, running, send
from tests.gateway.test_streams import BODY, events, read
from tests.relay import Relay, relay_to


class DistantEngine(FakeEngine):
    """An engine behind a link, which a test can lose."""

    relay: Relay

    async def start(self) -> None:
        await super().start()
        self._link = contextlib.AsyncExitStack()
        self.relay = await self._link.enter_async_context(relay_to(self.url.removeprefix("http://")))
        self.url = f"http://{self.relay.target}"

    async def stop(self) -> None:
        await self._link.aclose()
        await super().stop()


async def test_a_stream_on_a_lost_link_ends_with_an_error(
    tmp_path: Path, http: aiohttp.ClientSession
) -> None:
    lost = asyncio.Event()

    async def slow(_engine: FakeEngine, request: web.Request, _body: dict[str, Any]) -> Any:
        response = await begin(request)
        await send(response, chunk("one"))
        await lost.wait()
        await send(response, chunk("two"))
        await response.write(b"data: [DONE]\n\n")
        return response

    engine = DistantEngine("e", behave=slow)
    async with running(tmp_path, [engine], gateway__stall_timeout_s=2) as bench:
        url = bench.url + "/v1/chat/completions"
        async with asyncio.timeout(WAIT_S), http.post(url, json=BODY, headers=bench.auth()) as response:
            seen = await response.content.readuntil(b"\n\n")
            engine.relay.lose()
            lost.set()
            seen += await response.content.read()
        assert [event["error"]["code"] for event in events(seen.decode()) if "error" in event] == [
            "engine_timeout"
        ]
        assert "two" not in seen.decode()
        engine.behave = None
        assert (await read(bench, http))[0] == 200, "the next request has a connection of its own"


async def test_a_request_on_a_lost_link_is_served_by_another_engine(
    tmp_path: Path, http: aiohttp.ClientSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is sent on a connection that was kept, and nothing of it arrives."""
    monkeypatch.setattr(calls, "_KEEP_ALIVE_S", 300.0)
    distant, near = DistantEngine("far"), FakeEngine("near")
    async with running(tmp_path, [distant, near], gateway__first_token_timeout_s=3) as bench:
        assert (await read(bench, http))[0] == 200
        distant.relay.lose()
        bench.conductor.plans = [bench.plan("far"), bench.plan("near")]
        assert (await read(bench, http))[0] == 200
        assert (len(distant.requests), len(near.requests), distant.relay.opened) == (1, 1, 1)
        bench.conductor.plans = [bench.plan("far")]
        assert (await read(bench, http))[0] == 200
        assert (len(distant.requests), distant.relay.opened) == (2, 2)
