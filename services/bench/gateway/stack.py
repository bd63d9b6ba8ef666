"""What is measured: pool, conductor and gateway as real processes, with null engines that a stub registers.

Two models: one served by an instance that does everything, one by a prefill and a decode instance. The stub does what a
worker does for them: register, report, nothing else.
"""

from __future__ import annotations

import asyncio
import json
import random
import tempfile
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from mooncache.auth import Token, cache_salt, engine_key, load_cluster_token, tenant_token
from mooncache.bench.gateway.prompts import make_tokenizer
from mooncache.bench.worker import Worker, WorkerError
from mooncache.client.conductor_link import ConductorLink
from mooncache.cluster.embedded import ClusterSettings, EmbeddedCluster
from mooncache.cluster.ports import PortPicker
from mooncache.cluster.processes import Part, ServiceKind, stop_all
from mooncache.config import Config, load
from mooncache.kvcache.identity import tokenizer_digest
from mooncache.kvcache.keys import passport_from_json, passport_to_json, salted
from mooncache.kvcache.passport import Passport
from mooncache.proto.v1 import conductor_pb2 as pb

BOTH_MODEL, SPLIT_MODEL, FAMILY_MODEL = "null", "null-pd", "null-families"
_NULL_ENGINE = "mooncache.bench.null_engine"
_TOKEN_IDS = 200  # of the benchmark's small tokenizer
_BLOCK_TOKENS = 32
_MODEL_TOKENS = 1 << 20
_CALL_S = 5.0
_REPORT_S = 0.25
_READY_S = 60.0


@dataclass(frozen=True, slots=True)
class Families:
    """Prompts that begin alike in groups, and instances that each hold the beginnings of their share of the groups.

    Prompts are token ids, so that a benchmark knows their keys.
    """

    count: int
    instances: int
    shared_tokens: int
    tenant: str

    def prompt(self, family: int, number: int) -> list[int]:
        """The prompt of one request: what its family shares, and a few tokens of its own."""
        rng = random.Random(family)
        shared = [rng.randrange(_TOKEN_IDS) for _ in range(self.shared_tokens)]
        return [*shared, *(random.Random(f"{family} {number}").randrange(_TOKEN_IDS) for _ in range(8))]

    def keys_at(self, instance: int, described: pb.Instance, token: Token) -> bytes:
        """Keys of the blocks that an instance holds."""
        passport = salted(passport_from_json(described.passport_json), cache_salt(token, self.tenant))
        mine = range(instance, self.count, self.instances)
        return b"".join(passport.chain_keys(self.prompt(family, 0)[: self.shared_tokens]) for family in mine)


@dataclass(frozen=True, slots=True)
class Target:
    """Where requests go: `model` at 127.0.0.1:`port` with `key`."""

    port: int
    key: str
    model: str


@dataclass(frozen=True, slots=True)
class Stack:
    """A running system. The engine is the one behind the gateway for BOTH_MODEL; `env` configures more processes."""

    folder: Path
    state_dir: Path
    env: dict[str, str]
    gateway: Target
    split: Target
    engine: Target
    gateway_pid: int
    conductors: tuple[Part, ...]
    conductor_target: str
    token: Token
    instances: tuple[pb.Instance, ...]


@contextmanager
def start_stack(
    conductors: int = 1, families: Families | None = None, engine: tuple[str, ...] = ()
) -> Iterator[Stack]:
    """Start everything, for the time of a `with`.

    Args:
        conductors: more than one: a leader and standbys.
        families: instances of one more model, with the blocks that their engines say they hold.
        engine: further arguments of the null engines.

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
        gateway_port = ports.any()
        target = ",".join(f"127.0.0.1:{ports.any()}" for _ in range(conductors))
        parts = _parts(cluster, target, gateway_port, state_dir)
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
            arguments = ["--model", model, "--key", key, *engine]
            engines[model, role] = stack.enter_context(Worker(_NULL_ENGINE, arguments)).hello["port"]
        instances = [_instance(folder, model, role, port) for (model, role), port in engines.items()]
        overrides = {"cluster.state_dir": str(cluster.state_dir)}
        held: dict[str, bytes] = {}
        if families is not None:
            for number in range(families.instances):
                worker = stack.enter_context(Worker(_NULL_ENGINE, ["--model", FAMILY_MODEL, "--key", key]))
                more = _instance(folder, FAMILY_MODEL, pb.INSTANCE_ROLE_BOTH, worker.hello["port"])
                more.instance_id = f"{FAMILY_MODEL}-{number}"
                instances.append(more)
                held[more.instance_id] = families.keys_at(number, more, token)
        registrar = _Registrar(target, token, load(overrides=overrides), instances, held)
        stack.enter_context(registrar.running())
        tenant = tenant_token(token, "bench").text
        models = {instance.model for instance in instances}
        wait_ready(gateway_port, tenant, parts, models, lambda: registrar.reason)
        yield Stack(
            folder,
            cluster.state_dir,
            _common(cluster, target),
            Target(gateway_port, tenant, BOTH_MODEL),
            Target(gateway_port, tenant, SPLIT_MODEL),
            Target(engines[BOTH_MODEL, pb.INSTANCE_ROLE_BOTH], key, BOTH_MODEL),
            parts[-1].pid,
            tuple(parts[:-1]),
            target,
            token,
            tuple(instances),
        )


def _parts(cluster: EmbeddedCluster, conductors: str, gateway_port: int, state_dir: Path) -> list[Part]:
    common = _common(cluster, conductors)
    # null engines answer at once but the conductor cannot know that: it must not refuse what it predicts to be slow
    scheduling = {"MOONCACHE_CONDUCTOR_ADMISSION_ENABLED": "false"}
    parts = []
    for number, target in enumerate(conductors.split(","), 1):
        port = {"MOONCACHE_CONDUCTOR_PORT": target.rpartition(":")[2]}
        name = f"{ServiceKind.CONDUCTOR}-{number}"
        env = {**common, **scheduling, **port}
        parts.append(Part(name, ServiceKind.CONDUCTOR, env, state_dir / f"{name}.log"))
    serving = {
        "MOONCACHE_GATEWAY_PORT": str(gateway_port),
        "MOONCACHE_GATEWAY_DRAIN_TIMEOUT_S": "1",
        "MOONCACHE_GATEWAY_BATCH_DIR": str(state_dir / "batches"),
    }
    log = state_dir / f"{ServiceKind.GATEWAY}.log"
    return [*parts, Part(ServiceKind.GATEWAY, ServiceKind.GATEWAY, {**common, **serving}, log)]


def _common(cluster: EmbeddedCluster, conductors: str) -> dict[str, str]:
    """Settings of every process."""
    return {
        "MOONCACHE_CLUSTER_STATE_DIR": str(cluster.state_dir),
        "MOONCACHE_CLUSTER_MASTER_TARGETS": cluster.master_target,
        "MOONCACHE_CLUSTER_CONDUCTOR_TARGET": conductors,
        "MOONCACHE_LOGGING_LEVEL": "warning",
    }


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
    """Keeps instances alive at the conductor, in a thread with a loop of its own. held: keys in an engine's cache."""

    def __init__(
        self,
        target: str,
        token: Token,
        config: Config,
        instances: list[pb.Instance],
        held: dict[str, bytes],
    ) -> None:
        self._target, self._token, self._config, self.instances = target, token, config, instances
        self._held = held
        self._sequence = 0
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
                for instance in self.instances:
                    if not registered:
                        request = pb.RegisterInstanceRequest(instance=instance)
                        await link.call("RegisterInstance", request, pb.RegisterInstanceResponse, _CALL_S)
                    await self._report(link, instance, anew=not registered)
                registered = True
            except Exception as error:  # noqa: BLE001 - tried again; the wait for readiness tells
                self.reason, registered = repr(error), False
            await asyncio.sleep(_REPORT_S)
        await link.close()

    async def _report(self, link: ConductorLink, instance: pb.Instance, *, anew: bool) -> None:
        """One report, with the whole cache where the conductor asks for it."""
        name = instance.instance_id
        report = pb.ReportInstanceRequest(instance_id=name, incarnation=1, state=pb.INSTANCE_STATE_READY)
        for _ in range(2):
            if anew and name in self._held:
                self._sequence += 1
                report.changes.full, report.changes.stored = True, self._held[name]
                report.changes.sequence = self._sequence
            answer = await link.call("ReportInstance", report, pb.ReportInstanceResponse, _CALL_S)
            anew = answer.want_full
            if not anew:
                return


def wait_ready(
    port: int, key: str, parts: list[Part], models: set[str], why: Callable[[], str] = lambda: ""
) -> None:
    """Return once the gateway offers the models. Raises WorkerError; `why` is what keeps them away."""
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
            if models <= {card["id"] for card in seen}:
                return
        except (OSError, ValueError, KeyError) as error:
            seen = repr(error)
        time.sleep(0.1)
    logs = "\n".join(f"{part.name}: {part.log_tail()}" for part in parts)
    raise WorkerError(f"the gateway offers no models ({seen}) {why()}\n{logs}")
