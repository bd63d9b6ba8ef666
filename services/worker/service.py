"""The worker as a process: one engine, its duties, its end.

Losing the conductor never stops the engine: it serves, and is registered again when that is possible. Losing
the worker ends the engine, however the worker dies (see guard.py).
"""

from __future__ import annotations

import asyncio
import fcntl
import os
import random
import re
import secrets
import shutil
import socket
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from urllib.parse import urlsplit

from mooncache import auth
from mooncache.client.conductor_link import ConductorLink
from mooncache.client.host import host_id
from mooncache.client.members import Announcer, this_process
from mooncache.config import Config
from mooncache.errors import ConfigInvalid, EngineFailed, MooncacheError
from mooncache.kvcache.instance_role import InstanceRole
from mooncache.proto.v1 import conductor_pb2 as pb
from mooncache.runtime import tls
from mooncache.runtime.duties import Duty
from mooncache.runtime.logs import Event, get_logger
from mooncache.runtime.ports import make_socket_folder, port_of
from mooncache.runtime.rpc import WORKER_SERVICE, Handler, RpcTable
from mooncache.runtime.service import Service, run_service
from mooncache.runtime.supervision import RestartPolicy, RunState, Supervision
from mooncache.worker import adapters
from mooncache.worker.background import (
    follow_events,
    report_instance,
    run_engine,
    scrape_load,
    take_leg_reports,
)
from mooncache.worker.core.load import LoadMeter
from mooncache.worker.engine_http import EngineHttp
from mooncache.worker.metrics import WorkerCollector
from mooncache.worker.ops import get_worker_status
from mooncache.worker.state import WorkerState

HANDLERS: dict[str, Handler] = {"GetWorkerStatus": get_worker_status.handle}
_SOCKET_PATH_MAX = 107
_SOCKET_NAME = "/events-1000000.ipc"
_CALL_COUNT_MAX = 64
_ENGINE_GRACE_S = 6.0
# An engine that never became ready most likely cannot: a model that is not there, too little memory. Whoever started it
# waits for the reason.
_FIRST_RESTART_COUNT_MAX = 2
_DRAIN_TICK_S = 0.1

_WITHDRAWN = "withdrawn"  # in place of a fingerprint
log = get_logger(__name__)


class WorkerService(Service):
    """The worker as a service."""

    def __init__(self, config: Config, restarts: RestartPolicy | None = None) -> None:
        """`restarts`: other pauses and counts than an engine's defaults; the timeouts are the configuration's."""
        worker = config.worker
        self._restarts = restarts or RestartPolicy(first_restart_count_max=_FIRST_RESTART_COUNT_MAX)
        super().__init__(
            "worker",
            config,
            host=worker.host,
            port=worker.port,
            metrics_port=worker.metrics_port,
            call_count_max=_CALL_COUNT_MAX,
            drain_timeout_s=worker.drain_timeout_s,
            advertise_host=worker.advertise_host,
        )
        self._state: WorkerState | None = None
        self._announcer: Announcer | None = None
        self._lock = -1
        self._own_run_dir: Path | None = None
        self._engine_port_hold: socket.socket | None = None

    @property
    def state(self) -> WorkerState:
        assert self._state is not None, "build has not run"
        return self._state

    async def build(self) -> RpcTable:
        """Make the state; the engine is started by its duty, so that the ports answer while it loads."""
        config, worker = self.config, self.config.worker
        adapter = adapters.make(worker.engine, config)
        url = attach_url(worker.attach_url)
        engine_port = 0
        if not url:
            self._engine_port_hold = run_engine.hold_engine_port(config)
            held = self._engine_port_hold
            engine_port = port_of(held) if held is not None else worker.engine_port
            url = run_engine.engine_url(config, engine_port)
        instance_id = worker.instance_id or f"{socket.gethostname()[:100]}-{url.rpartition(':')[2]}"
        file_name = re.sub(r"[^A-Za-z0-9_.-]", "_", instance_id).lstrip(".") or "worker"
        state_dir = config.cluster.state_dir.expanduser().absolute()
        policy = replace(
            self._restarts, start_timeout_s=worker.start_timeout_s, hang_timeout_s=worker.hang_timeout_s
        )
        key = auth.engine_key(self.token)
        self._state = WorkerState(
            config=config,
            clock=self.clock,
            rng=random.Random(secrets.randbits(64)),
            adapter=adapter,
            link=ConductorLink(config.cluster.conductor_target, self.tokens, config),
            http=EngineHttp(key, tls.http_client_context(config.tls), config.tls.server_name),
            supervision=Supervision(policy),
            meter=LoadMeter(adapter.metrics),
            run_dir=self._run_dir(state_dir, file_name),
            state_dir=state_dir,
            instance_id=instance_id,
            file_name=file_name,
            role=InstanceRole(worker.role),
            host_id=config.client.host_id or host_id(),
            engine_key=key,
            engine_token=self.token.fingerprint,
            url=url,
            engine_port=engine_port,
            incarnation=secrets.randbits(63) | 1,
            worker_run=secrets.randbits(63) | 1,
        )
        self._announcer = Announcer(self._state.link, self.clock, self._member)
        if worker.model:
            run_engine.set_model(self._state, worker.model)
        else:
            self._state.model_name = worker.model_name or "tiny-model"
        self.metrics.registry.register(WorkerCollector(self._state))
        return RpcTable(WORKER_SERVICE, self._state, HANDLERS, admin_only=tuple(HANDLERS))

    async def tokens_changed(self) -> None:
        """The next engine is started with the key of the token that signs now."""
        self.state.next_engine_key = auth.engine_key(self.token)
        self.state.next_engine_token = self.token.fingerprint

    def engine_token(self) -> str:
        """The engine takes the key that it was started with; one whose token is withdrawn is named, too."""
        mine = self.state.engine_token
        return mine if mine in {token.fingerprint for token in self.tokens.tokens} else _WITHDRAWN

    def binds(self) -> Sequence[tuple[str, str]]:
        """The engine's port, too, unless the engine was opened elsewhere."""
        worker = self.config.worker
        own = () if worker.attach_url else (("worker.engine_host", worker.engine_host),)
        return [*super().binds(), *own]

    def duties(self) -> Sequence[Duty]:
        state = self.state
        return (
            Duty("run_engine", self._run_engine),
            Duty("scrape_load", lambda: scrape_load.run(state), scrape_load.INTERVAL_S),
            Duty("follow_events", lambda: follow_events.run(state)),
            Duty("take_leg_reports", lambda: take_leg_reports.run(state)),
            Duty("report_instance", lambda: report_instance.run(state)),
            *([] if self._announcer is None else [Duty("announce", self._announcer.run)]),
        )

    def _member(self) -> pb.Member:
        """This process, as the list of the cluster's processes has it."""
        state = self.state
        member = this_process(
            pb.MEMBER_KIND_WORKER, state.instance_id, self.grpc_target, self.started_ms, state.host_id
        )
        member.reason = self._readiness()
        waits = state.draining or self.draining
        member.state = "draining" if waits else "starting" if member.reason else "ready"
        return member

    async def _run_engine(self) -> None:
        """What starting again does not cure ends the worker at once; so does an engine that is given up."""
        state = self.state
        try:
            await run_engine.run(state)
        except (ConfigInvalid, EngineFailed) as error:
            state.supervision.state, state.supervision.reason = RunState.GIVEN_UP, error.message
            state.failure = error.message
        if state.failure:
            self.ask_to_stop()
            await asyncio.get_running_loop().create_future()  # until the service cancels its duties

    def readiness(self) -> str:
        """Ready when the engine takes requests."""
        state = self.state
        return "" if state.ready and not state.supervision.reason and not state.draining else state.doing

    def serving(self) -> str:
        """Requests come through the conductor, so it has to know of the engine."""
        state = self.state
        if not state.registered:
            return "not registered with the conductor"
        silent_s = self.clock.now_s() - state.heard_s
        return f"the conductor has not answered for {silent_s:.0f} s" if silent_s > state.lease_s else ""

    async def drain(self) -> None:
        """Say that nothing new shall come, and let the engine finish what it has."""
        state = self.state
        state.stopping = True
        state.wake_report.set()
        if state.attached or not state.ready:
            return
        log.info(Event.WORKER_DRAINING, instance_id=state.instance_id, running=state.load.running)
        asked_s = self.clock.now_s()
        # Two readings, because a request that was sent before the gateways heard of the end may still arrive.
        while state.ready and not (state.load_s > asked_s + scrape_load.INTERVAL_S and state.load.idle):
            await self.clock.sleep(_DRAIN_TICK_S)

    async def run(self) -> None:
        """As every service; raises EngineFailed when the engine was given up."""
        await super().run()
        if self._state is not None and self._state.failure:
            raise EngineFailed(self._state.failure)

    async def shutdown(self) -> None:
        if self._state is not None:
            await run_engine.stop(self._state, _ENGINE_GRACE_S)
            if self._announcer is not None and self.draining:
                await self._announcer.leave()
            await self._state.http.close()
            await self._state.link.close()
        if self._own_run_dir is not None:
            shutil.rmtree(self._own_run_dir, ignore_errors=True)
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1
        if self._engine_port_hold is not None:
            self._engine_port_hold.close()
            self._engine_port_hold = None

    def _run_dir(self, state_dir: Path, file_name: str) -> Path:
        """A folder that only this user can enter, for sockets and the passport file; one worker at a time.

        Raises:
            ConfigInvalid: another worker of this name runs, or the folder cannot be made.
        """
        folder = state_dir / "run" / file_name
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            folder.chmod(0o700)
            self._lock = os.open(folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigInvalid(
                f"A worker for {file_name} is already running (lock in {folder}); choose another worker.instance_id."
            ) from None
        except OSError as error:
            raise ConfigInvalid(f"The folder {folder} cannot be used: {error.strerror}.") from None
        if len(os.fsencode(folder)) + len(_SOCKET_NAME) <= _SOCKET_PATH_MAX:
            return folder
        self._own_run_dir = make_socket_folder()
        return self._own_run_dir


def attach_url(text: str) -> str:
    """The URL of an engine to attach to, without a slash at its end; "" for none.

    Raises:
        ConfigInvalid: it is not a URL of a server.
    """
    if not text:
        return ""
    try:
        parts = urlsplit(text)
        good = parts.scheme in ("http", "https") and parts.hostname and parts.port and not parts.query
    except ValueError:
        good = False
    if not good:
        raise ConfigInvalid(f"worker.attach_url is {text!r}; it has to be http://host:port.")
    return text.rstrip("/").removesuffix("/v1")


def run(config: Config) -> int:
    """Be a worker until a signal; the exit status is that of `run_service`."""
    try:
        return run_service("worker", config, lambda: WorkerService(config))
    except MooncacheError:  # pragma: no cover - run_service maps all of them
        return 1
