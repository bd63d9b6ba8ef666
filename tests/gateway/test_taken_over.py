"""A gateway whose port is its parent's: it leaves connections to the next process; limits change while it runs."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from mooncache.config import Config
from mooncache.gateway import service as gateway_service
from mooncache.runtime import service
from mooncache.runtime.ports import hold_port, port_of
from tests.conditions import until
from tests.gateway.stand_in import Bench, FakeEngine, running
from tests.gateway.test_requests import CHAT, PATH, ask


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> Iterator[socket.socket]:
    """The parent's socket, as each gateway of the test gets it."""
    with hold_port("127.0.0.1") as listening:
        listening.listen(8)
        monkeypatch.setattr(gateway_service, "passed_listener", listening.dup)
        yield listening


def request_to(bench: Bench) -> bytes:
    body = json.dumps(CHAT).encode()
    lines = [
        f"POST {PATH} HTTP/1.1",
        "Host: x",
        f"Content-Length: {len(body)}",
        *(f"{name}: {value}" for name, value in bench.auth().items()),
    ]
    return "\r\n".join((*lines, "", "")).encode() + body


async def answer_of(reader: asyncio.StreamReader) -> tuple[int, list[str]]:
    head = (await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 30)).decode().lower().split("\r\n")
    return int(head[0].split()[1]), head


async def test_an_ending_gateway_serves_whom_it_took_and_leaves_the_others(
    tmp_path: Path, held: socket.socket
) -> None:
    async with running(tmp_path, [FakeEngine("e")], gateway__drain_timeout_s=30.0) as bench:
        assert bench.gateway.http_port == port_of(held)
        data = request_to(bench)
        taken, writer = await asyncio.open_connection("127.0.0.1", port_of(held))
        writer.write(data)
        status, head = await answer_of(taken)
        assert status == 200 and "connection: close" not in head
        stopping = asyncio.create_task(bench.gateway.stop())
        await until(lambda: bench.gateway.state.leaving, "it takes no more connections")
        await asyncio.sleep(0)
        late, late_writer = await asyncio.open_connection("127.0.0.1", port_of(held))
        late_writer.write(data)
        await taken.readexactly(
            int(next(line for line in head if line.startswith("content-length")).split()[1])
        )
        writer.write(data)
        status, head = await answer_of(taken)
        assert status == 200 and "connection: close" in head, (
            "the connection was open, so it is served, once more"
        )
        await stopping
        assert not late.at_eof(), "it waits in the queue"
        async with running(tmp_path, [FakeEngine("e2")]) as following:
            assert following.gateway.http_port == port_of(held)
            assert (await answer_of(late))[0] == 200, "the next process has answered"
        writer.close()
        late_writer.close()


async def test_who_waited_waits_for_the_first_list_of_engines_too(
    tmp_path: Path, held: socket.socket, http: aiohttp.ClientSession
) -> None:
    async with running(tmp_path, [FakeEngine("e")]) as bench:
        state = bench.gateway.state
        state.fleet.known = False
        call = asyncio.create_task(ask(bench, http, CHAT))
        await until(lambda: state.active_count == 1, "it is there")
        state.fleet.known = True
        assert (await call)[0] == 200


async def test_limits_change_while_it_runs(
    tmp_path: Path, http: aiohttp.ClientSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with running(tmp_path, [FakeEngine("e")]) as bench:

        async def reload(**changes: Any) -> None:
            config = bench.gateway.config
            wanted: Config = config.model_copy(update={"gateway": config.gateway.model_copy(update=changes)})
            monkeypatch.setattr(service, "load", lambda: wanted)
            await bench.gateway.reload()

        assert (await ask(bench, http, CHAT))[0] == 200
        await reload(tenant_body_bytes_max=1024)
        large = {**CHAT, "user": "x" * 2000}
        assert (await ask(bench, http, large))[0] in (413, 429)
        await reload(tenant_body_bytes_max=1 << 20, request_count_max=0)
        assert (await ask(bench, http, large))[0] == 429
        await reload(request_count_max=100, requests_per_minute=1.0)
        found = [(await ask(bench, http, CHAT))[0] for _ in range(3)]
        assert found[-1] == 429, found
        await reload(requests_per_minute=0.0)
        assert (await ask(bench, http, CHAT))[0] == 200
