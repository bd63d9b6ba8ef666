"""The real conductor over real gRPC on loopback, without a pool: life of instances, decisions, bad input, restart."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from mooncache.proto.v1 import conductor_pb2 as pb
from tests.conductor.support import (
    BLOCK,
    PASSPORT,
    Conductor,
    chain,
    config_at,
    instance,
    running,
)

PREFILL, DECODE = pb.INSTANCE_ROLE_PREFILL, pb.INSTANCE_ROLE_DECODE
CALM = {"conductor.suspect_after_s": 60, "conductor.lease_s": 120}


def serve(folder: Path, scenario: Callable[[Conductor], Awaitable[None]], **overrides: Any) -> None:
    async def run() -> None:
        async with running(config_at(folder, **{**CALM, **overrides})) as conductor:
            await scenario(conductor)

    asyncio.run(run())


def pair() -> list[pb.Instance]:
    return [instance("p", PREFILL), instance("d", DECODE)]


def test_register_report_schedule_list(tmp_path: Path) -> None:
    async def scenario(c: Conductor) -> None:
        answer = await c.call("RegisterInstance", pb.RegisterInstanceRequest(instance=instance("p", PREFILL)))
        assert (answer.report_interval_ms, answer.lease_ms, answer.role) == (250, 120_000, PREFILL)
        await c.register(instance("d", DECODE))
        await c.report("p", load=pb.InstanceLoad(waiting=2, kv_usage=0.5))
        listed = await c.call("ListInstances", pb.ListInstancesRequest())
        assert [v.instance.instance_id for v in listed.instances] == ["d", "p"]
        assert listed.instances[1].load.waiting == 2
        assert listed.instances[1].instance.passport_json == PASSPORT
        plan = await c.schedule("r1", chain("a", 100))
        assert plan.admitted, plan
        assert plan.reason == "admitted"
        assert (plan.prefill.instance_id, plan.decode.instance_id) == ("p", "d")
        assert plan.prefill.url == "http://127.0.0.1:1/p"
        assert plan.decode.wait_tokens == 100 * BLOCK
        assert plan.decode.wait_ms > 0
        assert plan.summary.startswith(
            "prefill=p;decode=d;branch=local;local=0;pool=0;computed=1605;ttft_ms="
        )
        assert (await c.record("r1"))["decision_id"] == plan.decision_id

    serve(tmp_path, scenario)
