"""What is measured: pool, conductor and gateway as real processes, with null engines that a stub registers.

Two models: one served by an instance that does everything, one by a prefill and a decode instance. The stub does what a
worker does for them: register, report, nothing else.
"""

from __future__ import annotations

import asyncio
import json
import tempfile
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from mooncache.auth import Token, engine_key, load_cluster_token, tenant_token
from mooncache.bench.gateway.prompts import make_tokenizer
from mooncache.bench.worker import Worker, WorkerError
from mooncache.client.conductor_link import ConductorLink
from mooncache.cluster.embedded import ClusterSettings, EmbeddedCluster
from mooncache.cluster.ports import PortPicker
from mooncache.cluster.processes import Part, ServiceKind, stop_all
from mooncache.config import Config, load
from mooncache.kvcache.identity import tokenizer_digest
from mooncache.kvcache.keys import passport_to_json
from mooncache.kvcache.passport import Passport
from mooncache.proto.v1 import conductor_pb2 as pb

BOTH_MODEL, SPLIT_MODEL = "null", "null-pd"
_BLOCK_TOKENS = 32
_MODEL_TOKENS = 1 << 20
_CALL_S = 5.0
_REPORT_S = 0.25
_READY_S = 60.0


@dataclass(frozen=True, slots=True)
class Target:
    """Where requests go: `model` at 127.0.0.1:`port` with `key`."""

    port: int
    key: str
    model: str


@dataclass(frozen=True, slots=True)
class Stack:
    """A running system. The engine is the one behind the gateway for BOTH_MODEL."""

    folder: Path
    gateway: Target
    split: Target
    engine: Target
    gateway_pid: int


@contextmanager
def start_stack() -> Iterator[Stack]:
    """Start everything, for the time of a `with`.

    Raises:
        WorkerError: something did not start; the text has the end of its log.
    """
    with ExitStack() as stack:
        state_dir = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="mooncache-bench-")))
        folder = state_dir / "model"
        folder.mkdir()
        make_tokenizer(folder)
        cluster = EmbeddedCluster(
            ClusterSettings(
                state_dir=state_dir / "pool", nodes=1, capacity_bytes=64 << 20, port=0, log_level="warning"
            )
        )
        cluster.start()
        stack.callback(cluster.stop)
        token = load_cluster_token(cluster.token_path)
        ports = stack.enter_context(PortPicker("127.0.0.1"))
        conductor_port, gateway_port = ports.any(), ports.any()
        parts = _parts(cluster, conductor_port, gateway_port, state_dir)
        stack.callback(stop_all, parts, 8.0)
        for part in parts:
            part.start()
        key = engine_key(token)
        engines = {
            (BOTH_MODEL, pb.INSTANCE_ROLE_BOTH): 0,
            (SPLIT_MODEL, pb.INSTANCE_ROLE_PREFILL): 0,
            (SPLIT_MODEL, pb.INSTANCE_ROLE_DECODE): 0,
        }
        for model, role in engines:
            arguments = ["--model", model, "--key", key]
            worker = stack.enter_context(Worker("mooncache.bench.null_engine", arguments))
            engines[model, role] = worker.hello["port"]
        instances = [_instance(folder, model, role, port) for (model, role), port in engines.items()]
        overrides = {"cluster.state_dir": str(cluster.state_dir)}
        registrar = _Registrar(f"127.0.0.1:{conductor_port}", token, load(overrides=overrides), instances)
        stack.enter_context(registrar.running())
        tenant = tenant_token(token, "bench").text
        _wait_ready(gateway_port, tenant, parts, registrar)
        yield Stack(
            folder,
            Target(gateway_port, tenant, BOTH_MODEL),
            Target(gateway_port, tenant, SPLIT_MODEL),
            Target(engines[BOTH_MODEL, pb.INSTANCE_ROLE_BOTH], key, BOTH_MODEL),
            parts[1].pid,
        )


def _parts(cluster: EmbeddedCluster, conductor_port: int, gateway_port: int, state_dir: Path) -> list[Part]:
    common = {
        "MOONCACHE_CLUSTER_STATE_DIR": str(cluster.state_dir),
        "MOONCACHE_CLUSTER_MASTER_TARGETS": cluster.master_target,
        "MOONCACHE_CLUSTER_CONDUCTOR_TARGET": f"127.0.0.1:{conductor_port}",
        "MOONCACHE_LOGGING_LEVEL": "warning",
    }
    own = {
        # null engines answer at once but the conductor cannot know that: it must not refuse what it predicts to be slow
        ServiceKind.CONDUCTOR: {
            "MOONCACHE_CONDUCTOR_PORT": str(conductor_port),
            "MOONCACHE_CONDUCTOR_ADMISSION_ENABLED": "false",
        },
        ServiceKind.GATEWAY: {
            "MOONCACHE_GATEWAY_PORT": str(gateway_port),
            "MOONCACHE_GATEWAY_DRAIN_TIMEOUT_S": "1",
        },
    }
    return [
        Part(service, service, {**common, **env}, state_dir / f"{service}.log")
        for service, env in own.items()
    ]


def _instance(folder: Path, model: str, role: pb.InstanceRole, port: int) -> pb.Instance:
    passport = Passport(
        weights_digest="null",
        config_digest="null",
        tokenizer_digest=tokenizer_digest(folder),
        engine="null",
        kv_dtype="null",
        kv_layout="null",
        block_tokens=_BLOCK_TOKENS,
    )
    return pb.Instance(
        instance_id=f"{model}-{role}",
        incarnation=1,
        role=role,
        state=pb.INSTANCE_STATE_READY,
        engine="null",
        url=f"http://127.0.0.1:{port}",
        model=model,
        tokenizer_path=str(folder),
        max_model_tokens=_MODEL_TOKENS,
        kv_capacity_tokens=_MODEL_TOKENS,
        block_tokens=_BLOCK_TOKENS,
        passport_json=passport_to_json(passport),
        kv_bytes_per_token=1024,
        host_id="bench",
        max_sequences=256,
        pool=True,
    )


class _Registrar:
    """Keeps instances alive at the conductor, in a thread with a loop of its own."""

    def __init__(self, target: str, token: Token, config: Config, instances: list[pb.Instance]) -> None:
        self._target, self._token, self._config, self._instances = target, token, config, instances
        self._ended = threading.Event()
        self.reason = "nothing was tried"

    @contextmanager
    def running(self) -> Iterator[None]:
        thread = threading.Thread(target=lambda: asyncio.run(self._work()), name="registrar")
        thread.start()
        try:
            yield
        finally:
            self._ended.set()
            thread.join()

    async def _work(self) -> None:
        link = ConductorLink(self._target, self._token.text, self._config)
        registered = False
        while not self._ended.is_set():
            try:
                for instance in self._instances:
                    if not registered:
                        request = pb.RegisterInstanceRequest(instance=instance)
                        await link.call("RegisterInstance", request, pb.RegisterInstanceResponse, _CALL_S)
                    report = pb.ReportInstanceRequest(
                        instance_id=instance.instance_id, incarnation=1, state=pb.INSTANCE_STATE_READY
                    )
                    await link.call("ReportInstance", report, pb.ReportInstanceResponse, _CALL_S)
                registered = True
            except Exception as error:  # noqa: BLE001 - tried again; the wait for readiness tells
                self.reason, registered = repr(error), False
            await asyncio.sleep(_REPORT_S)
        await link.close()


def _wait_ready(port: int, key: str, parts: list[Part], registrar: _Registrar) -> None:
    deadline_s = time.monotonic() + _READY_S
    seen = "nothing"
    while time.monotonic() < deadline_s:
        for part in parts:
            if part.exit_code is not None:
                raise WorkerError(f"the {part.name} ended: {part.log_tail()}")
        request = urllib.request.Request(
            f"http://127.0.0.1:{port}/v1/models", headers={"authorization": f"Bearer {key}"}
        )
        try:
            with urllib.request.urlopen(request, timeout=_CALL_S) as answer:
                seen = json.load(answer)["data"]
            if {BOTH_MODEL, SPLIT_MODEL} <= {card["id"] for card in seen}:
                return
        except (OSError, ValueError, KeyError) as error:
            seen = repr(error)
        time.sleep(0.1)
    logs = "\n".join(f"{part.name}: {part.log_tail()}" for part in parts)
    raise WorkerError(f"the gateway offers no models ({seen}; registrar: {registrar.reason})\n{logs}")
