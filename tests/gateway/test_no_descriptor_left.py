"""Gateway, conductor and master without a descriptor left: what is open goes on, nothing spins, and all serve again."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import resource
import socket
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from mooncache.bench.gateway.stack import Stack, start_stack
from mooncache.client.state_dir import read_cluster_file
from mooncache.errors import ConductorUnavailable, DeadlineExceeded, MasterUnavailable, MooncacheError
from mooncache.proto.v1 import conductor_pb2, master_pb2
from mooncache.runtime.grpc_channel import GrpcChannel
from mooncache.runtime.rpc import CONDUCTOR_SERVICE, MASTER_SERVICE
from tests.conditions import until

pytestmark = pytest.mark.timeout(300)
LEFT = 6  # descriptors that the process may still open
STRANGERS = 80
LOOK_S = 2.0
FIRST_TOKEN_S = 4.0
CALL_S = 60.0
NONE_LEFT = re.compile("Too many open files|File descriptor limit reached|out of system resource")


@pytest.fixture(scope="module")
def stack() -> Iterator[Stack]:
    """A pool, a conductor, a gateway, and engines that answer after a while."""
    with start_stack(engine=("--first-token-s", str(FIRST_TOKEN_S))) as found:
        yield found


@dataclass(frozen=True)
class Process:
    """One that has a port."""

    pid: int
    port: int
    log: Path

    @property
    def open_count(self) -> int:
        return len(os.listdir(f"/proc/{self.pid}/fd"))

    @property
    def processor_s(self) -> float:
        fields = Path(f"/proc/{self.pid}/stat").read_text().rpartition(") ")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    @property
    def lines(self) -> int:
        return self.log.read_bytes().count(b"\n")


def process_of(stack: Stack, name: str) -> Process:
    folder = stack.folder.parent
    if name == "gateway":
        return Process(stack.gateway_pid, stack.gateway.port, folder / "gateway.log")
    if name == "conductor":
        port = int(stack.conductor_target.rpartition(":")[2])
        return Process(stack.conductors[0].pid, port, folder / "conductor-1.log")
    cluster = read_cluster_file(stack.state_dir)
    assert cluster is not None
    (pid,) = (part.pid for part in cluster.parts if part.name == "master")
    port = int(cluster.master_targets[0].rpartition(":")[2])
    return Process(pid, port, stack.state_dir / "logs" / "master.log")


@contextmanager
def few_descriptors(process: Process) -> Iterator[int]:
    """How many it may have."""
    former = resource.prlimit(process.pid, resource.RLIMIT_NOFILE)
    most = process.open_count + LEFT
    resource.prlimit(process.pid, resource.RLIMIT_NOFILE, (most, former[1]))
    try:
        yield most
    finally:
        resource.prlimit(process.pid, resource.RLIMIT_NOFILE, former)


@contextmanager
def strangers(port: int) -> Iterator[list[socket.socket]]:
    """Connections that say nothing."""
    with contextlib.ExitStack() as stack:
        made = []
        for _ in range(STRANGERS):
            one = stack.enter_context(socket.socket())
            one.setblocking(False)
            one.connect_ex(("127.0.0.1", port))
            made.append(one)
        yield made


class Control:
    """A connection to a conductor's or a master's control port."""

    def __init__(self, stack: Stack, process: Process, name: str) -> None:
        of: dict[str, tuple[Any, type[MooncacheError], tuple[str, Any, Any]]] = {
            "conductor": (
                CONDUCTOR_SERVICE,
                ConductorUnavailable,
                (
                    "GetConductorStatus",
                    conductor_pb2.GetConductorStatusRequest(),
                    conductor_pb2.GetConductorStatusResponse,
                ),
            ),
            "master": (
                MASTER_SERVICE,
                MasterUnavailable,
                ("GetStatus", master_pb2.GetStatusRequest(), master_pb2.GetStatusResponse),
            ),
        }
        service, unavailable, self._call = of[name]
        self._channel = GrpcChannel(
            f"127.0.0.1:{process.port}", service, token=stack.token.text, unavailable_error=unavailable
        )

    async def ask(self, at_most_s: float = CALL_S) -> str:
        """What went wrong, "" for nothing."""
        try:
            await self.status(at_most_s)
        except (ConductorUnavailable, MasterUnavailable, DeadlineExceeded) as error:
            return error.name
        return ""

    async def status(self, at_most_s: float = CALL_S) -> Any:
        return await self._channel.call(*self._call, at_most_s)

    async def close(self) -> None:
        await self._channel.close()


class Http:
    """A connection to the gateway, which is kept."""

    def __init__(self, stack: Stack, process: Process, _name: str) -> None:
        self._url = f"http://127.0.0.1:{process.port}"
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=1),
            headers={"authorization": f"Bearer {stack.gateway.key}"},
        )
        self._model = stack.gateway.model

    async def ask(self, at_most_s: float = CALL_S) -> str:
        try:
            timeout = aiohttp.ClientTimeout(total=at_most_s)
            async with self._session.get(f"{self._url}/v1/models", timeout=timeout) as answer:
                return "" if answer.status == 200 else str(answer.status)
        except (aiohttp.ClientError, TimeoutError) as error:
            return type(error).__name__

    async def complete(self) -> tuple[int, str]:
        body = {"model": self._model, "prompt": "What is open goes on.", "max_tokens": 4}
        timeout = aiohttp.ClientTimeout(total=CALL_S)
        async with self._session.post(f"{self._url}/v1/completions", json=body, timeout=timeout) as answer:
            return answer.status, await answer.text()

    async def close(self) -> None:
        await self._session.close()


@asynccontextmanager
async def connected(stack: Stack, process: Process, name: str) -> AsyncIterator[Any]:
    found = (Http if name == "gateway" else Control)(stack, process, name)
    try:
        yield found
    finally:
        await found.close()


async def serves(stack: Stack, process: Process, name: str) -> bool:
    """Whether somebody who connects now is answered."""
    async with connected(stack, process, name) as caller:
        return not await caller.ask()


async def is_under_way(stack: Stack) -> bool:
    """Whether the request has been planned, and its engine connected."""
    async with connected(stack, process_of(stack, "conductor"), "conductor") as conductor:
        planned = (await conductor.status()).active_request_count
    return bool(planned and established(stack.engine.port))


def established(port: int) -> int:
    """Connections of this machine to that port of its own."""
    lines = Path("/proc/net/tcp").read_text().splitlines()[1:]
    return sum(line.split()[2:4] == [f"0100007F:{port:04X}", "01"] for line in lines)


@pytest.mark.parametrize("name", ["gateway", "conductor", "master"])
async def test_without_a_descriptor(stack: Stack, name: str) -> None:
    process = process_of(stack, name)
    async with connected(stack, process, name) as before, connected(stack, process, name) as other:
        assert await before.ask() == ""
        answer = asyncio.create_task(other.complete()) if name == "gateway" else None
        if answer is not None:
            await until(lambda: is_under_way(stack), "a request with an engine")
        with few_descriptors(process) as most:
            with strangers(process.port):
                await until(lambda: process.open_count >= most - 1, "none is left")
                await until(lambda: NONE_LEFT.search(process.log.read_text()), "its log says so")
                lines, processor_s = process.lines, process.processor_s
                await asyncio.sleep(LOOK_S)
                assert process.processor_s - processor_s < LOOK_S / 2, "it does not spin"
                assert process.lines - lines < 20, process.log.read_text()[-3000:]
                assert await before.ask() == "", "who was connected is served"
                async with connected(stack, process, name) as late:
                    await late.ask(2.0)  # it fails, or nothing happens
                if answer is not None:
                    assert (await answer)[0] == 200
            await until(lambda: serves(stack, process, name), "it serves who connects")
            assert await before.ask() == ""
