"""Real processes for tests: masters and an etcd server, always killed at the end."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import TypeVar

import pytest

from mooncache import errors
from mooncache.auth import load_cluster_token
from mooncache.proto.v1 import master_pb2
from mooncache.runtime.grpc_channel import GrpcChannel
from mooncache.runtime.rpc import MASTER_SERVICE
from tests.conditions import until
from tests.coordination.backends import Backend
from tests.coordination.kubernetes_api import running_api
from tests.ports import own_port

T = TypeVar("T")
ETCD = shutil.which("etcd")


@contextlib.asynccontextmanager
async def process(*arguments: str, **environment: str) -> AsyncIterator[asyncio.subprocess.Process]:
    """Run a program until the block ends."""
    started = await asyncio.create_subprocess_exec(
        *arguments,
        env=os.environ | environment,
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.DEVNULL,
    )
    try:
        yield started
    finally:
        if started.returncode is None:
            started.kill()
        await started.wait()


def master(
    folder: Path, port: int, **settings: str
) -> contextlib.AbstractAsyncContextManager[asyncio.subprocess.Process]:
    """Run a master process."""
    return process(
        sys.executable,
        "-m",
        "mooncache.master",
        MOONCACHE_CLUSTER_STATE_DIR=str(folder),
        MOONCACHE_MASTER_PORT=str(port),
        MOONCACHE_METRICS_ENABLED="false",
        **settings,
    )


@contextlib.asynccontextmanager
async def etcd(folder: Path) -> AsyncIterator[str]:
    """Run an etcd server; yields its client address."""
    assert ETCD is not None
    client, peer = own_port(), own_port()
    urls = f"http://127.0.0.1:{client}", f"http://127.0.0.1:{peer}"
    arguments = ["--data-dir", str(folder / "etcd"), "--listen-client-urls", urls[0]]
    arguments += ["--advertise-client-urls", urls[0], "--listen-peer-urls", urls[1]]
    arguments += ["--initial-advertise-peer-urls", urls[1], "--initial-cluster", f"default={urls[1]}"]
    async with process(ETCD, *arguments):
        yield f"127.0.0.1:{client}"


@contextlib.asynccontextmanager
async def election_by(backend: str, folder: Path, lease_s: float = 2) -> AsyncIterator[dict[str, str]]:
    """What elects, etcd or a Lease; yields the settings of masters that use it."""
    if backend == "lease":
        with running_api(folder / "kubernetes") as api:
            yield Backend(backend, api).env(lease_s)
        return
    if ETCD is None:
        pytest.skip("no etcd here; install the Debian package etcd-server")
    async with etcd(folder) as address:
        yield {
            "MOONCACHE_COORDINATION_BACKEND": "etcd",
            "MOONCACHE_COORDINATION_ETCD_ENDPOINTS": address,
            "MOONCACHE_COORDINATION_LEASE_S": str(lease_s),
        }


@contextlib.asynccontextmanager
async def channel_to(target: str, token: str) -> AsyncIterator[GrpcChannel]:
    channel = GrpcChannel(target, MASTER_SERVICE, token=token)
    try:
        yield channel
    finally:
        await channel.close()


async def eventually(probe: Callable[[], Awaitable[T | None]], limit_s: float = 40.0) -> T:
    """Call `probe` until it returns something but None; a refusal counts as None."""
    found: list[T] = []

    async def succeeded() -> bool:
        with contextlib.suppress(errors.MooncacheError):
            answer = await probe()
            if answer is not None:
                found.append(answer)
        return bool(found)

    await until(succeeded, timeout_s=limit_s)
    return found[0]


async def leading_status(target: str, folder: Path) -> master_pb2.GetStatusResponse:
    """Ask until the master leads."""

    async def probe() -> master_pb2.GetStatusResponse | None:
        token = load_cluster_token(folder / "cluster.token").text
        async with channel_to(target, token) as call:
            status = await call.call(
                "GetStatus", master_pb2.GetStatusRequest(), master_pb2.GetStatusResponse, 2.0
            )
            return status if status.leading else None

    return await eventually(probe)
