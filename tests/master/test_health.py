"""Health of real masters and store nodes over gRPC: a standby, a leader, a node with and without a master, draining."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

from mooncache.config import load
from mooncache.coordination import EmbeddedCoordinator, Leadership, MasterRecord
from mooncache.master.service import MasterService
from mooncache.runtime.clock import SystemClock
from mooncache.store_node.service import StoreNodeService
from tests.conditions import until
from tests.ports import own_port
from tests.rpcs import health_of

MASTER, NODE = "mooncache.v1.MasterService", "mooncache.v1.StoreNodeService"
SERVING, NOT_SERVING = "SERVING", "NOT_SERVING"


class SecondInLine(EmbeddedCoordinator):
    """Another master leads until `turn` is set."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder / "master.term", SystemClock())
        self.turn = asyncio.Event()

    async def leader(self) -> MasterRecord | None:
        return await super().leader() if self.turn.is_set() else MasterRecord("first", "127.0.0.1:1")

    async def campaign(self) -> Leadership:
        await self.turn.wait()
        return await super().campaign()


def settings(folder: Path, **changes: Any) -> dict[str, Any]:
    return {"cluster.state_dir": folder, "metrics.enabled": False, "logging.level": "error", **changes}


async def test_a_standby_is_ready_but_serves_no_calls_until_it_leads(tmp_path: Path) -> None:
    line = SecondInLine(tmp_path)
    service = MasterService(
        load(env={}, overrides=settings(tmp_path, **{"master.port": 0})), coordinator=line
    )
    await service.start()
    target = service.grpc_target
    try:
        await until(lambda: service.readiness() == "", "it knows the leader")
        assert [await health_of(target, name) for name in ("", "liveness", MASTER)] == [
            SERVING,
            SERVING,
            NOT_SERVING,
        ]
        line.turn.set()
        await until(lambda: service.state.leading, "it leads")
        assert await health_of(target, MASTER) == SERVING
    finally:
        await service.stop()


async def test_a_node_serves_while_it_has_a_master_and_does_not_drain(tmp_path: Path) -> None:
    port = own_port()
    node = StoreNodeService(
        load(
            env={},
            overrides=settings(
                tmp_path,
                **{
                    "cluster.master_targets": (f"127.0.0.1:{port}",),
                    "store_node.capacity_bytes": 16 << 20,
                    "store_node.unix_enabled": False,
                },
            ),
        )
    )
    await node.start()
    try:
        assert await health_of(node.grpc_target) == SERVING, "it serves blocks that clients know of"
        assert await health_of(node.grpc_target, NODE) == NOT_SERVING
        lease = {"master.heartbeat_interval_s": 0.2, "master.suspect_after_s": 0.6, "master.lease_s": 1.5}
        master = MasterService(load(env={}, overrides=settings(tmp_path, **{"master.port": port, **lease})))
        await master.start()
        try:

            async def says(status: str) -> bool:
                return await health_of(node.grpc_target, NODE) == status

            await until(lambda: says(SERVING), "registered")
            node.state.set_draining(True)
            assert await says(NOT_SERVING)
            assert await health_of(node.grpc_target) == SERVING, "reads go on"
            node.state.set_draining(False)
            await until(lambda: says(SERVING), "as before")
        finally:
            await master.stop()
        await until(lambda: says(NOT_SERVING), "the master is gone")
    finally:
        await node.stop()
