"""Master processes that elect by a Lease: a leader that is stopped, and an API server that goes away and comes back."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path

from mooncache import errors
from mooncache.auth import create_cluster_token, load_cluster_token
from mooncache.proto.v1 import master_pb2
from tests.coordination.backends import Backend
from tests.coordination.kubernetes_api import KubernetesApi, running_api
from tests.master.processes import channel_to, eventually, leading_status, master
from tests.ports import own_port
from tests.processes import freeze


class Masters:
    """Two of them; the first one leads."""

    def __init__(self, folder: Path, api: KubernetesApi, lease_s: float) -> None:
        self.folder, self.api = folder, api
        self.settings = Backend("lease", api).env(lease_s)
        self.ports = own_port(), own_port()
        self.targets = [f"127.0.0.1:{port}" for port in self.ports]
        self.pids: list[int] = []

    async def term(self, at: int) -> int:
        """In which this one leads."""
        return (await leading_status(self.targets[at], self.folder)).term

    async def says(self, at: int) -> str:
        """What this one answers to a call for a leader: "" when it carries it out."""
        token = load_cluster_token(self.folder / "cluster.token").text
        async with channel_to(self.targets[at], token) as channel:
            request = master_pb2.GetClusterMapRequest()
            try:
                await channel.call("GetClusterMap", request, master_pb2.GetClusterMapResponse, 5.0)
            except errors.NotLeader as refused:
                return refused.message
        return ""


@contextlib.asynccontextmanager
async def two_masters(folder: Path, lease_s: float = 2) -> AsyncIterator[Masters]:
    create_cluster_token(folder / "cluster.token")
    with running_api(folder / "kubernetes") as api:
        made = Masters(folder, api, lease_s)
        async with contextlib.AsyncExitStack() as processes:
            for at, port in enumerate(made.ports):
                started = await processes.enter_async_context(
                    master(folder, port, MOONCACHE_MASTER_MASTER_ID=f"m{at}", **made.settings)
                )
                made.pids.append(started.pid)
                if not at:
                    await made.term(0)
            yield made


async def test_a_stopped_leader_is_replaced_and_refuses_when_it_goes_on(tmp_path: Path) -> None:
    async with two_masters(tmp_path) as masters:
        before = await masters.term(0)
        freeze(masters.pids[0])
        after = await masters.term(1)
        assert after > before

        async def refuses() -> bool | None:
            return True if masters.targets[1] in await masters.says(0) else None

        os.kill(masters.pids[0], signal.SIGCONT)
        await eventually(refuses)
        assert await masters.term(1) == after


async def test_nobody_leads_without_the_api_server_and_one_does_when_it_is_back(tmp_path: Path) -> None:
    async with two_masters(tmp_path) as masters:
        before = await masters.term(0)
        masters.api.stop()

        async def nobody() -> bool | None:
            return True if await masters.says(0) and await masters.says(1) else None

        await eventually(nobody)
        masters.api.start()

        async def somebody() -> int | None:
            leading = [at for at in (0, 1) if not await masters.says(at)]
            return leading[0] if leading else None

        leader = await eventually(somebody)
        assert await masters.term(leader) > before
        assert await masters.says(1 - leader)


async def test_a_leader_that_ends_frees_the_lease(tmp_path: Path) -> None:
    """Its time is longer than the test has."""
    async with two_masters(tmp_path, lease_s=120) as masters:
        before = await masters.term(0)
        os.kill(masters.pids[0], signal.SIGTERM)
        assert await masters.term(1) > before
