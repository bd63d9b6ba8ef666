"""Worker and conductor as they are: registered, listed, switched, drained, known again after a restart."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from mooncache.client.conductor_link import ConductorLink
from mooncache.conductor.service import ConductorService
from mooncache.proto.v1 import conductor_pb2 as pb
from mooncache.worker.service import WorkerService
from tests.conditions import until
from tests.worker.support import order, settings
from tests.worker.test_kv_events import BLOCK, pack, stored


async def test_the_conductor_knows_the_instance_and_its_cache(tmp_path: Path) -> None:
    config = settings(tmp_path, conductor__port=0)
    order(config, batches=[pack(stored([1, 2], list(range(2 * BLOCK)))).hex()])
    conductor = ConductorService(config)
    await conductor.start()
    port = int(conductor.grpc_target.rpartition(":")[2])
    worker = WorkerService(settings(tmp_path, port))
    link = ConductorLink(conductor.grpc_target, conductor.token.text, config)
    views: list[pb.InstanceView] = []

    async def look(wanted: Any, what: str) -> pb.InstanceView:
        async def ask() -> bool:
            answer = await link.call("ListInstances", pb.ListInstancesRequest(), pb.ListInstancesResponse, 10)
            views[:] = answer.instances
            return bool(views) and bool(wanted(views[0]))

        await until(ask, lambda: f"{what}: {views}", every_s=0.05)
        return views[0]

    try:
        await worker.start()
        view = await look(
            lambda v: v.instance.state == pb.INSTANCE_STATE_READY and v.cached_blocks == 2,
            "ready with its blocks",
        )
        assert view.instance.url == worker.state.url
        assert view.instance.engine_token == worker.token.fingerprint
        request = pb.SetInstanceRequest(instance_id="fake-1", role=pb.INSTANCE_ROLE_DECODE, drain=True)
        await link.call("SetInstance", request, pb.SetInstanceResponse, 10)
        await until(lambda: worker.state.role == "decode", "decode")
        await look(lambda v: v.instance.state == pb.INSTANCE_STATE_DRAINING, "draining")
        await conductor.stop()
        conductor = ConductorService(settings(tmp_path, conductor__port=port))
        await conductor.start()
        await look(lambda v: v.report_age_ms < 1000, "told again to a new conductor")
        reports = worker.state.counters["reports"]
        await until(lambda: worker.state.counters["reports"] > reports + 2, "reports")
        await look(lambda v: v.instance.state == pb.INSTANCE_STATE_DRAINING, "still draining")
        one = conductor.state.core.registry.get("fake-1")
        assert one is not None
        assert one.role_pinned, "the load does not undo an operator's choice"
        assert one.role == "decode"
        await link.call(
            "SetInstance",
            pb.SetInstanceRequest(instance_id="fake-1", drain=False),
            pb.SetInstanceResponse,
            10,
        )
        await look(lambda v: v.instance.state == pb.INSTANCE_STATE_READY, "ready again")
        await conductor.stop()
        conductor = ConductorService(settings(tmp_path, conductor__port=port))
        await conductor.start()
        view = await look(lambda v: v.cached_blocks == 2, "told again to a new conductor")
        assert view.instance.role == pb.INSTANCE_ROLE_DECODE
    finally:
        await link.close()
        await worker.stop()
        await conductor.stop()
