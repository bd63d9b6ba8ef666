"""What the conductor's tests share: chains of keys, instances, a service on real gRPC."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from mooncache.conductor.config import settings_of
from mooncache.conductor.core.decisions import Decision, SchedulerSettings
from mooncache.conductor.core.policy.types import Rules
from mooncache.conductor.core.progress import LegReport, Phase, ProgressReport
from mooncache.conductor.core.scheduler import Scheduler
from mooncache.conductor.service import ConductorService
from mooncache.config import ConductorSection, Config, load
from mooncache.errors import ConductorUnavailable
from mooncache.kvcache.leg_hint import CacheReport, LegRole, LoadedFrom
from mooncache.proto.v1 import conductor_pb2 as pb
from mooncache.runtime.grpc_channel import GrpcChannel
from mooncache.runtime.rpc import CONDUCTOR_SERVICE
from tests.rpcs import answer_of

BLOCK = 16
PREFILL, DECODE = pb.INSTANCE_ROLE_PREFILL, pb.INSTANCE_ROLE_DECODE
INLINE_TOKENS_MAX = 512
"""The bound of tests about hand-overs: instances that only tests use are idle, and would compute prompts themselves."""
CALM = {"conductor.suspect_after_s": 60, "conductor.lease_s": 120}
PASSPORT = json.dumps(
    {
        "weights_digest": "w",
        "config_digest": "c",
        "tokenizer_digest": "t",
        "engine": "test",
        "kv_dtype": "fp32",
        "kv_layout": "l",
        "block_tokens": BLOCK,
    }
)


def chain(name: str, blocks: int, *, parent: str = "", shared: int = 0) -> bytes:
    """Packed keys of a prompt; the first `shared` are those of `parent`."""
    own = [hashlib.sha256(f"{name}:{i}".encode()).digest() for i in range(shared, blocks)]
    return chain(parent, shared) + b"".join(own) if shared else b"".join(own)


def scheduler_settings(**changes: Any) -> SchedulerSettings:
    """The usual settings with the usual rules of policies, but for these."""
    rules = Rules(inline_tokens_max=INLINE_TOKENS_MAX)
    return replace(settings_of(ConductorSection()), **{"rules": rules, **changes})


def instance(name: str, role: int = pb.INSTANCE_ROLE_BOTH, **fields: Any) -> pb.Instance:
    given = {
        "instance_id": name,
        "incarnation": 1,
        "role": role,
        "state": pb.INSTANCE_STATE_READY,
        "engine": "hf",
        "url": f"http://127.0.0.1:1/{name}",
        "model": "m",
        "max_model_tokens": 100_000,
        "kv_capacity_tokens": 1_000_000,
        "block_tokens": BLOCK,
        "passport_json": PASSPORT,
        "kv_bytes_per_token": 1024,
        "max_sequences": 64,
        "pool": True,
    }
    return pb.Instance(**{**given, **fields})


def config_at(folder: Path, **overrides: Any) -> Config:
    settings = {
        "cluster.state_dir": str(folder),
        "cluster.master_targets": "127.0.0.1:1",
        "conductor.port": 0,
        "conductor.inline_tokens_max": INLINE_TOKENS_MAX,
        "logging.level": "error",
        **overrides,
    }
    return load(env={}, overrides=settings)


class Conductor:
    """A running service and a channel to it."""

    def __init__(self, service: ConductorService) -> None:
        self.service = service
        self.channel = GrpcChannel(
            service.grpc_target,
            CONDUCTOR_SERVICE,
            token=service.token.text,
            unavailable_error=ConductorUnavailable,
        )

    async def call(self, method: str, request: Any, timeout_s: float = 10.0) -> Any:
        return await self.channel.call(method, request, answer_of(CONDUCTOR_SERVICE, method), timeout_s)

    async def register(self, *instances: pb.Instance) -> None:
        for one in instances:
            await self.call("RegisterInstance", pb.RegisterInstanceRequest(instance=one))

    async def report(self, name: str, **fields: Any) -> pb.ReportInstanceResponse:
        given = {"instance_id": name, "incarnation": 1, "state": pb.INSTANCE_STATE_READY}
        response: pb.ReportInstanceResponse = await self.call(
            "ReportInstance", pb.ReportInstanceRequest(**{**given, **fields})
        )
        return response

    async def schedule(self, request_id: str, keys: bytes, **fields: Any) -> pb.ScheduleResponse:
        tokens = len(keys) // 32 * BLOCK + 5
        given = {"request_id": request_id, "tenant": "t", "model": "m", "prompt_tokens": tokens, "keys": keys}
        response: pb.ScheduleResponse = await self.call("Schedule", pb.ScheduleRequest(**{**given, **fields}))
        return response

    async def progress(self, decision_id: str, phase: int, *legs: pb.LegReport, **fields: Any) -> None:
        report = pb.ReportProgressRequest(decision_id=decision_id, phase=phase, legs=legs, **fields)
        await self.call("ReportProgress", report)

    async def record(self, name: str) -> dict[str, Any]:
        response = await self.call("GetDecision", pb.GetDecisionRequest(id=name))
        found: dict[str, Any] = json.loads(response.record_json)
        return found


@contextlib.asynccontextmanager
async def running(config: Config) -> AsyncIterator[Conductor]:
    service = ConductorService(config)
    await service.start()
    conductor = Conductor(service)
    try:
        yield conductor
        service.state.check()
    finally:
        await conductor.channel.close()
        await service.stop()


def serve(folder: Path, scenario: Callable[[Conductor], Awaitable[None]], **overrides: Any) -> None:
    """Run a scenario against a conductor of its own; instances live long unless the overrides say otherwise."""

    async def run() -> None:
        async with running(config_at(folder, **{**CALM, **overrides})) as conductor:
            await scenario(conductor)

    asyncio.run(run())


def pair() -> list[pb.Instance]:
    """A prefill instance "p" and a decode instance "d"."""
    return [instance("p", PREFILL), instance("d", DECODE)]


def loaded(core: Scheduler, decision: Decision, place: LoadedFrom, seconds: float, now_s: float) -> None:
    """The engine says that it loaded 64 MiB from there, in so many seconds."""
    tokens = place.blocks * BLOCK
    cache = CacheReport(
        hit_tokens=tokens,
        loaded_tokens=tokens,
        loaded_bytes=64 << 20,
        load_ms=seconds * 1e3,
        loaded_from=(place,),
    )
    first = ProgressReport(Phase.FIRST_TOKEN, elapsed_s=seconds + 0.5)
    core.report_progress(decision.decision_id, first, now_s)
    leg = LegReport(LegRole.DECODE, decision.decode, cache=cache)
    end = ProgressReport(Phase.FINISHED, elapsed_s=seconds + 1, output_tokens=4, legs=(leg,))
    core.report_progress(decision.decision_id, end, now_s)
