"""What the worker's tests share: a conductor that records, an adapter for the fake engine, waiting with a limit."""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from mooncache.auth import load_or_create_cluster_token
from mooncache.client.keys import split_keys
from mooncache.config import Config, load
from mooncache.errors import ConductorUnavailable, InstanceUnknown
from mooncache.kvcache.keys import passport_to_json
from mooncache.kvcache.passport import Passport
from mooncache.proto.v1 import conductor_pb2 as pb
from mooncache.runtime import rpc
from mooncache.runtime.clock import SystemClock
from mooncache.runtime.grpc_server import GrpcServer
from mooncache.runtime.rpc import CallContext, RpcTable
from mooncache.runtime.run_op import OpRunner
from mooncache.runtime.supervision import RestartPolicy
from mooncache.worker.adapters.base import Command, EngineAdapter, Launch
from mooncache.worker.core.load import MetricNames

PASSPORT = Passport(
    weights_digest="w",
    config_digest="c",
    tokenizer_digest="t",
    engine="fake",
    kv_dtype="float32",
    kv_layout="fake",
    block_tokens=4,
)


@dataclass
class Conductor:
    """Takes registrations and reports as the real one does, and remembers all of them."""

    port: int = 0
    instances: dict[str, pb.Instance] = field(default_factory=dict)
    registrations: list[pb.Instance] = field(default_factory=list)
    reports: list[pb.ReportInstanceRequest] = field(default_factory=list)
    held: dict[str, set[bytes]] = field(default_factory=dict)
    sequence: dict[str, int] = field(default_factory=dict)
    roles: dict[str, int] = field(default_factory=dict)
    lease_ms: int = 10_000
    drain: bool = False
    want_full: bool = False
    silent: bool = False

    async def register(self, _state: Any, request: pb.RegisterInstanceRequest, _: CallContext) -> Any:
        self._check()
        instance = request.instance
        known = self.instances.get(instance.instance_id)
        if known is None or known.incarnation != instance.incarnation:
            self.held[instance.instance_id], self.sequence[instance.instance_id] = set(), 0
        self.instances[instance.instance_id] = instance
        self.registrations.append(instance)
        role = self.roles.get(instance.instance_id, instance.role)
        return pb.RegisterInstanceResponse(report_interval_ms=50, lease_ms=self.lease_ms, role=role)  # type: ignore[arg-type]

    async def report(self, _state: Any, request: pb.ReportInstanceRequest, _: CallContext) -> Any:
        self._check()
        name = request.instance_id
        known = self.instances.get(name)
        if known is None or known.incarnation != request.incarnation:
            raise InstanceUnknown("register again")
        self.reports.append(request)
        wish_full, self.want_full = self.want_full, False
        if request.HasField("changes"):
            wish_full |= not self._apply(name, request.changes)
        role = self.roles.get(name, known.role)
        return pb.ReportInstanceResponse(role=role, drain=self.drain, want_full=wish_full)  # type: ignore[arg-type]

    def _apply(self, name: str, changes: pb.CacheChanges) -> bool:
        held = self.held[name]
        if changes.full:
            held.clear()
        elif changes.sequence <= self.sequence[name]:
            return True
        elif changes.sequence != self.sequence[name] + 1:
            return False
        self.sequence[name] = changes.sequence
        held |= set(split_keys(changes.stored))
        held -= set(split_keys(changes.removed))
        return True

    def _check(self) -> None:
        if self.silent:
            raise ConductorUnavailable("told to be silent")

    def state(self) -> int:
        """State of the last report, 0 before there is one."""
        return self.reports[-1].state if self.reports else 0


@contextlib.asynccontextmanager
async def conductor(config: Config, port: int = 0) -> AsyncIterator[Conductor]:
    """A recording conductor on a real port."""
    found = Conductor()

    async def refuse(*_: Any) -> Any:
        raise ConductorUnavailable("not part of this test")

    handlers: dict[str, rpc.Handler] = dict.fromkeys(rpc.methods_of(rpc.CONDUCTOR_SERVICE), refuse)
    handlers |= {"RegisterInstance": found.register, "ReportInstance": found.report}
    table = RpcTable(rpc.CONDUCTOR_SERVICE, None, handlers, admin_only=tuple(handlers))
    token, _ = load_or_create_cluster_token(config.cluster.token_path)
    server = GrpcServer(OpRunner(table, SystemClock()), token, SystemClock(), call_count_max=64, health=dict)
    await server.start("127.0.0.1", port, None)
    found.port = server.port
    try:
        yield found
    finally:
        await server.stop(0)


class FakeAdapter(EngineAdapter):
    """Starts fake_engine.py; what it shall do stands in the state folder's fake.json (see there)."""

    name: ClassVar[str] = "fake"
    kv_events: ClassVar[bool] = True
    metrics: ClassVar[MetricNames] = MetricNames(
        waiting=("fake_waiting",), running=("fake_running",), ttft=("fake_ttft",)
    )

    def command(self, launch: Launch) -> Command:
        settings = {
            "model_name": launch.model_name,
            "port": launch.port,
            "orders": str(launch.state_dir / "orders.json"),
            "events": launch.events_endpoint,
            "replay": launch.replay_endpoint,
            "passport": json.dumps({"passport": json.loads(passport_to_json(PASSPORT)), "pool": True}),
            "passport_path": str(launch.passport_path),
            "grandchild": True,
            "cert": str(launch.tls_cert or ""),
            "key": str(launch.tls_key or ""),
        }
        script = Path(__file__).with_name("fake_engine.py")
        return Command(
            (sys.executable, str(script), json.dumps(settings)), {"FAKE_ENGINE_KEY": launch.engine_key}
        )


QUICK_RESTARTS = RestartPolicy(backoff_first_s=0.05, backoff_max_s=0.2)


def order(config: Config, **orders: Any) -> None:
    """Tell the fake engine what to do; everything that is not named goes back to normal."""
    path = config.cluster.state_dir / "orders.json"
    partial = path.with_suffix(".part")
    partial.write_text(json.dumps(orders))
    partial.replace(path)


def settings(folder: Path, conductor_port: int = 1, **changes: Any) -> Config:
    """Configuration of a worker of the fake engine."""
    values: dict[str, Any] = {
        "cluster.state_dir": folder,
        "cluster.conductor_target": f"127.0.0.1:{conductor_port}",
        "conductor.report_interval_s": 0.05,
        "worker.engine": f"{__name__}:FakeAdapter",
        "worker.model": str(folder),
        "worker.model_name": "fake-model",
        "worker.instance_id": "fake-1",
        "worker.drain_timeout_s": 10.0,
    }
    return load(
        env={}, overrides=values | {name.replace("__", "."): value for name, value in changes.items()}
    )


def alive(pid: int) -> bool:
    """Whether the process runs (a zombie does not)."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return stat.rpartition(")")[2].split()[0] != "Z"


def marked(mark: str) -> list[int]:
    """Running processes that carry a word in their environment: an engine and all that it started."""
    found = []
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit() and int(folder.name) != os.getpid():
            with contextlib.suppress(OSError):
                if mark.encode() in (folder / "environ").read_bytes() and alive(int(folder.name)):
                    found.append(int(folder.name))
    return found
