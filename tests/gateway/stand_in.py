"""Parts around a gateway under test: a conductor of a few lines over real gRPC, and engines that misbehave on request.

They exist to inject faults. What real engines do with a request is tested with real ones, in tests/openai_client.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from aiohttp import web

from mooncache.config import Config, load
from mooncache.errors import InvalidArgument
from mooncache.gateway.service import GatewayService
from mooncache.proto.v1 import conductor_pb2 as pb
from mooncache.runtime.rpc import CONDUCTOR_SERVICE, CallContext, Handler, RpcTable
from mooncache.runtime.service import Service
from tests.conditions import until

MODEL = "test-model"


class StandInConductor(Service):
    """Answers Schedule with `plans` in turn (the last one forever), and remembers what it was told."""

    def __init__(self, config: Config) -> None:
        super().__init__(
            "conductor",
            config,
            host="127.0.0.1",
            port=0,
            metrics_port=0,
            call_count_max=256,
            drain_timeout_s=0.1,
        )
        self.instances: list[pb.Instance] = []
        self.version = 1
        self.changed = asyncio.Event()
        self.plans: list[pb.ScheduleResponse] = []
        self.think: Callable[[pb.ScheduleRequest], Awaitable[pb.ScheduleResponse]] | None = None
        self.scheduled: list[pb.ScheduleRequest] = []
        self.updates: list[pb.ReportProgressRequest] = []
        self.updated = asyncio.Event()
        self.found_blocks: int | None = None  # leading blocks in the pool; None: it cannot be asked
        self.asked_blocks: list[int] = []
        self.asked_nodes: list[str] = []

    async def build(self) -> RpcTable:
        names = [method.name for method in CONDUCTOR_SERVICE.methods]
        handlers: dict[str, Handler] = dict.fromkeys(names, _refuse)
        handlers |= {
            "Schedule": _schedule,
            "ReportProgress": _update,
            "ListInstances": _list,
            "FindBlocks": _find,
        }
        return RpcTable(CONDUCTOR_SERVICE, self, handlers)

    def phases(self) -> list[str]:
        """Phases that were reported, in order."""
        return [pb.RequestPhase.Name(update.phase).removeprefix("REQUEST_PHASE_") for update in self.updates]

    def last_legs(self) -> list[tuple[str, str, str]]:
        """(role, instance, code) of the legs of the last report."""
        names = {pb.LEG_ROLE_PREFILL: "prefill", pb.LEG_ROLE_DECODE: "decode"}
        return [(names[leg.role], leg.instance_id, leg.code) for leg in self.updates[-1].legs]

    async def wait_for_phase(self, *names: str) -> None:
        """Return once one of the phases was reported."""
        async with asyncio.timeout(20):
            while not set(names) & set(self.phases()):
                self.updated.clear()
                await self.updated.wait()

    def set_instances(self, instances: list[pb.Instance]) -> None:
        self.instances, self.version = instances, self.version + 1
        self.changed.set()


async def _refuse(_state: Any, _request: Any, _context: CallContext) -> Any:
    raise InvalidArgument("the stand-in does not do this")


async def _schedule(
    state: StandInConductor, request: pb.ScheduleRequest, _context: CallContext
) -> pb.ScheduleResponse:
    state.scheduled.append(request)
    if state.think is not None:
        return await state.think(request)
    return state.plans.pop(0) if len(state.plans) > 1 else state.plans[0]


async def _update(
    state: StandInConductor, request: pb.ReportProgressRequest, _context: CallContext
) -> pb.ReportProgressResponse:
    state.updates += [request, *request.more]
    state.updated.set()
    return pb.ReportProgressResponse()


async def _find(
    state: StandInConductor, request: pb.FindBlocksRequest, _context: CallContext
) -> pb.FindBlocksResponse:
    state.asked_blocks.append(len(request.keys) // 32)
    state.asked_nodes.append(request.store_node)
    return pb.FindBlocksResponse(known=state.found_blocks is not None, leading_blocks=state.found_blocks or 0)


async def _list(
    state: StandInConductor, request: pb.ListInstancesRequest, _context: CallContext
) -> pb.ListInstancesResponse:
    if request.known_version == state.version and request.wait_ms:
        state.changed.clear()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(request.wait_ms / 1e3):
                await state.changed.wait()
    views = [pb.InstanceView(instance=instance) for instance in state.instances]
    return pb.ListInstancesResponse(version=state.version, instances=views)


Behaviour = Callable[["FakeEngine", web.Request, dict[str, Any]], Any]


@dataclass
class FakeEngine:
    """An HTTP server that answers as `behave` says; `tokens` is what a good answer generates."""

    name: str
    role: int = pb.INSTANCE_ROLE_BOTH
    behave: Behaviour | None = None
    tokens: int = 3
    url: str = ""
    requests: list[dict[str, Any]] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)
    paths: list[str] = field(default_factory=list)
    asked: asyncio.Event = field(default_factory=asyncio.Event)
    left: asyncio.Event = field(default_factory=asyncio.Event)
    runner: web.AppRunner | None = None
    cached_tokens: int = 0
    prompt_tokens: int = 40
    held_tokens: int | None = None  # of the prompt in the pool, as it tells; None: it does not say
    count: Callable[[dict[str, Any]], int] | None = None  # what it counts in a body; None: always the same

    async def start(self) -> None:
        app = web.Application(client_max_size=1 << 30)
        app.router.add_post("/v1/{tail:.*}", self._handle)
        self.runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1)
        await self.runner.setup()
        site = web.TCPSite(self.runner, "127.0.0.1", 0)
        await site.start()
        self.url = f"http://127.0.0.1:{self.runner.addresses[0][1]}"

    async def stop(self) -> None:
        if self.runner is not None:
            runner, self.runner = self.runner, None
            await runner.cleanup()

    def instance(self, **changes: Any) -> pb.Instance:
        fields: dict[str, Any] = {
            "instance_id": self.name,
            "incarnation": 1,
            "role": self.role,
            "state": pb.INSTANCE_STATE_READY,
            "engine": "fake",
            "url": self.url,
            "model": MODEL,
            "max_model_tokens": 4096,
        }
        return pb.Instance(**(fields | changes))

    async def _handle(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        if self.count is not None:
            self.prompt_tokens = self.count(body)
        self.requests.append(body)
        self.paths.append(request.path)
        self.headers.append({name.lower(): value for name, value in request.headers.items()})
        self.asked.set()
        try:
            found: web.StreamResponse = await (self.behave or good)(self, request, body)
            return found
        except (asyncio.CancelledError, ConnectionResetError):
            self.left.set()
            raise


def usage_of(engine: FakeEngine) -> dict[str, Any]:
    return {
        "prompt_tokens": engine.prompt_tokens,
        "completion_tokens": engine.tokens,
        "total_tokens": engine.prompt_tokens + engine.tokens,
        "prompt_tokens_details": {"cached_tokens": engine.cached_tokens},
    }


def chunk(text: str, **more: Any) -> dict[str, Any]:
    choice = {"index": 0, "delta": {"content": text}, "finish_reason": None}
    head = {"id": "chatcmpl-1", "object": "chat.completion.chunk", "created": 1, "model": MODEL}
    return {**head, "choices": [choice], **more}


async def good(engine: FakeEngine, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
    """A correct answer, streamed when asked for."""
    said_held = {} if engine.held_tokens is None else {"held_tokens": engine.held_tokens}
    reported = {"mooncache": {"v": 1, "hit_tokens": engine.cached_tokens, "outcome": "hit", **said_held}}
    if not body.get("stream"):
        chat = request.path.endswith("/chat/completions")
        message = {"role": "assistant", "content": "one two three"}
        said = {"message": message} if chat else {"text": "one two three"}
        return web.json_response(
            {
                "id": "chatcmpl-1",
                "object": "chat.completion" if chat else "text_completion",
                "created": 1,
                "model": MODEL,
                "choices": [{"index": 0, "finish_reason": "stop", **said}],
                "usage": usage_of(engine),
                "kv_transfer_params": reported,
            }
        )
    response = await begin(request)
    for number in range(engine.tokens):
        await send(response, chunk(f"t{number} "))
    if (body.get("stream_options") or {}).get("include_usage"):
        last = chunk("", usage=usage_of(engine), kv_transfer_params=reported)
        await send(response, {**last, "choices": []})
    await response.write(b"data: [DONE]\n\n")
    return response


async def begin(request: web.Request) -> web.StreamResponse:
    response = web.StreamResponse(headers={"content-type": "text/event-stream"})
    await response.prepare(request)
    return response


async def send(response: web.StreamResponse, event: dict[str, Any]) -> None:
    await response.write(b"data: " + json.dumps(event).encode() + b"\n\n")


@dataclass
class Bench:
    """A running gateway with its surroundings."""

    gateway: GatewayService
    conductor: StandInConductor
    engines: dict[str, FakeEngine]

    @property
    def url(self) -> str:
        return self.gateway.url

    def key(self, tenant: str = "alice") -> str:
        from mooncache.auth import tenant_token

        return tenant_token(self.gateway.token, tenant).text

    def auth(self, tenant: str = "alice") -> dict[str, str]:
        return {"authorization": f"Bearer {self.key(tenant)}"}

    def plan(self, decode: str, prefill: str = "", **more: Any) -> pb.ScheduleResponse:
        """A plan that names engines."""
        response = pb.ScheduleResponse(
            decision_id=more.pop("decision_id", "d-1"),
            admitted=True,
            reason=pb.ADMISSION_REASON_ADMITTED,
            summary="both=1",
        )
        response.decode.CopyFrom(pb.Leg(instance_id=decode, url=self.engines[decode].url, wait_ms=1000))
        if prefill:
            response.prefill.CopyFrom(pb.Leg(instance_id=prefill, url=self.engines[prefill].url))
        return response


@contextlib.asynccontextmanager
async def running(
    folder: Path,
    engines: list[FakeEngine],
    *,
    instance: dict[str, Any] | None = None,
    serves: type[GatewayService] = GatewayService,
    **settings: Any,
) -> AsyncIterator[Bench]:
    """Conductor, engines and gateway in this loop; the first engine is the plan until a test says otherwise."""
    overrides = {"cluster.state_dir": folder, "gateway.port": 0, "gateway.drain_timeout_s": 0.2}
    overrides["endpoint_picker.port"] = 0
    overrides |= {name.replace("__", "."): value for name, value in settings.items()}
    conductor = StandInConductor(load(env={}, overrides={"cluster.state_dir": folder}))
    for engine in engines:
        await engine.start()
    conductor.instances = [engine.instance(**(instance or {})) for engine in engines]
    await conductor.start()
    gateway = serves(load(env={}, overrides=overrides | {"cluster.conductor_target": conductor.grpc_target}))
    bench = Bench(gateway, conductor, {engine.name: engine for engine in engines})
    conductor.plans = [bench.plan(engines[0].name)] if engines else []
    try:
        await gateway.start()
        await until(lambda: gateway.state.fleet.known)
        yield bench
    finally:
        await gateway.stop()
        await conductor.stop()
        for engine in engines:
            await engine.stop()
