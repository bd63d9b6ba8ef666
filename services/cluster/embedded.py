"""A whole cluster on this machine, the same processes as anywhere else: a pool, and with an engine all that serves.

Idea: the parent prepares a state folder (token, sockets, logs), starts all processes at once, waits until they work
together, and writes `cluster.json` so that clients here need no arguments. A lock on the folder keeps two clusters
apart. Children end with the parent, whatever happens to it.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import fcntl
import os
import secrets
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any, Self

from mooncache.auth import load_cluster_token, load_or_create_cluster_token, tenant_token
from mooncache.client.results import NodeView
from mooncache.client.state_dir import remove_cluster_file, write_cluster_file
from mooncache.cluster.interpreter import forget_interpreter
from mooncache.cluster.layout import HOLDER_SOCKET, ClusterLayout, is_worker, plan
from mooncache.cluster.ports import PortPicker
from mooncache.cluster.processes import Part, ServiceKind, end_leftovers, stop_all, wait_for_end
from mooncache.cluster.settings import ClusterSettings
from mooncache.cluster.supervisor import (
    SERVICE_POLICY,
    STARTED,
    PartNews,
    PartRecord,
    StartProgress,
    Supervisor,
)
from mooncache.cluster.watch import Watch
from mooncache.config import load
from mooncache.errors import ConfigInvalid
from mooncache.kvcache.instance_messages import INSTANCE_ROLES
from mooncache.kvcache.instance_role import InstanceRole
from mooncache.runtime.ports import UNIX_PATH_MAX, make_socket_folder
from mooncache.runtime.supervision import RunState
from mooncache.store_node.keeping import end_holder
from mooncache.whole_file import write_whole

__all__ = ["ClusterSettings", "EmbeddedCluster", "StartProgress"]

DEMO_TENANT = "demo"
START_POOL_S = 30.0
START_ENGINES_S = 600.0
_STOP_S = 8.0
_HOLDER_END_S = 5.0
_STOP_ORDER = (  # those first whose goodbye needs the others: streams end, engines leave, nodes sign off at the master
    {ServiceKind.GATEWAY},
    {ServiceKind.WORKER},
    {ServiceKind.STORE_NODE, ServiceKind.CONDUCTOR},
    {ServiceKind.MASTER},
)


def _never() -> bool:
    return False


def _say_nothing(_name: str, _news: PartNews) -> None:
    """Progress that is not shown."""


class EmbeddedCluster:
    """A whole cluster of processes on this machine. Use it as a context manager, or `start` and `stop` it."""

    def __init__(self, settings: ClusterSettings) -> None:
        self.settings = settings
        self.state_dir = settings.state_dir.expanduser().absolute()
        self.layout = ClusterLayout({}, "", "", "")
        self.token_created = False
        self.run_id = secrets.token_hex(8)
        self._lock: IO[str] | None = None
        self._ports = PortPicker(settings.host)
        self._run_dir: Path | None = None
        self._records: dict[str, PartRecord] = {}

    # --- life ------------------------------------------------------------------------------------------------

    def start(
        self,
        timeout_s: float | None = None,
        progress: StartProgress | None = None,
        should_stop: Callable[[], bool] = _never,
    ) -> None:
        """Start everything and return once it works together: nodes active, engines ready, models offered.

        `timeout_s` None is 30 s for a pool and ten minutes with engines. `should_stop` is asked all the time.

        Raises:
            ConfigInvalid: the folder or a port is taken, or a part refused its configuration.
            Internal: a part ended otherwise while it started; the text has its exit code and last lines.
            MasterUnavailable, EngineUnavailable: not ready in time.
            Cancelled: `should_stop` said so.
        """
        tell = progress or _say_nothing
        self._take_folder()
        try:
            self._prepare()
            self._announce(ready=False)
            deadline_s = time.monotonic() + (timeout_s if timeout_s is not None else self._usual_start_s())
            for name, part in self.parts.items():
                part.start()
                tell(name, STARTED)
            self.wait_ready(max(0.1, deadline_s - time.monotonic()), tell, should_stop)
            self._announce(ready=True)
        except BaseException:
            self.stop()
            raise

    def stop(self, timeout_s: float = _STOP_S) -> list[str]:
        """Stop everything; returns the names of parts that had to be killed. Harmless when nothing runs."""
        killed: list[str] = []
        for services in _STOP_ORDER:
            killed += stop_all([part for part in self.parts.values() if part.service in services], timeout_s)
        if self.settings.keep_memory and self._run_dir is not None:
            end_holder(self._run_dir / HOLDER_SOCKET)
            wait_for_end(self.run_id, _HOLDER_END_S)  # it ends by itself; what is killed is what did not
        if self.settings.serves:
            end_leftovers(self.run_id)
        remove_cluster_file(self.state_dir, os.getpid())
        if self._run_dir is not None and self._run_dir.parent != self.state_dir:
            shutil.rmtree(self._run_dir, ignore_errors=True)
        self._ports.close()
        if self._lock is not None:
            self._lock.close()
            self._lock = None
        return killed

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    # --- watching --------------------------------------------------------------------------------------------

    @property
    def parts(self) -> dict[str, Part]:
        """Every process by name, in the order in which they start."""
        return self.layout.parts

    @property
    def master_target(self) -> str:
        """host:port of the master."""
        return self.layout.master_target

    def wait_ready(
        self,
        timeout_s: float,
        progress: StartProgress | None = None,
        should_stop: Callable[[], bool] = _never,
    ) -> tuple[NodeView, ...]:
        """Wait until every running part works together with the rest; returns the nodes. Raises as `start` does."""

        async def wait() -> tuple[NodeView, ...]:
            looking = Watch(self.layout, self.state_dir, self.token_path)
            try:
                return await looking.until_ready(timeout_s, progress or _say_nothing, should_stop)
            finally:
                await looking.close()

        return asyncio.run(wait())

    def supervise(self, progress: StartProgress, should_stop: Callable[[], bool]) -> list[str]:
        """Start parts again that end or hang, until `should_stop` or all are given up; returns those given up.

        `cluster.json` says after each change what runs, under which process id, and what was started again.
        """
        hang_timeout_s = load(overrides={"cluster.state_dir": str(self.state_dir)}).cluster.hang_timeout_s
        policy = dataclasses.replace(SERVICE_POLICY, hang_timeout_s=hang_timeout_s)

        async def keep() -> list[str]:
            looking = Watch(self.layout, self.state_dir, self.token_path)
            supervisor = Supervisor(self.parts, policy, looking.answers, progress, self._announce_ready)
            self._records = supervisor.records
            try:
                await looking.supervise(supervisor, should_stop)
            finally:
                await looking.close()
            return supervisor.given_up

        return asyncio.run(keep())

    def describe_instances(self) -> list[dict[str, Any]]:
        """The engines, one line each: instance_id, role, engine, model, url, pid of worker and engine."""

        async def look() -> list[dict[str, object]]:
            looking = Watch(self.layout, self.state_dir, self.token_path)
            try:
                views = {view.instance.instance_id: view.instance for view in await looking.instances()}
                rows = []
                for name, part in self.parts.items():
                    if not is_worker(part) or name not in views:
                        continue
                    instance, status = views[name], await looking.worker_status(part)
                    rows.append(
                        {
                            "instance_id": name,
                            "role": INSTANCE_ROLES.get(instance.role, InstanceRole.BOTH),
                            "engine": f"{instance.engine} {instance.engine_version}".strip(),
                            "model": instance.model,
                            "max_model_tokens": instance.max_model_tokens,
                            "pool": instance.pool,
                            "url": instance.url,
                            "pid": part.pid,
                            "engine_pid": status.engine_pid if status is not None else 0,
                        }
                    )
                return rows
            finally:
                await looking.close()

        return asyncio.run(look())

    def kill(self, name: str, number: signal.Signals = signal.SIGKILL) -> None:
        """Kill one part and wait for its end (tests break things with it)."""
        part = self.parts[name]
        part.send(number)
        part.wait(10.0)

    def restart(self, name: str) -> None:
        """Start an ended part again, at the same address."""
        self.parts[name].start()

    @property
    def token_path(self) -> Path:
        """The cluster token."""
        return load(overrides={"cluster.state_dir": str(self.state_dir)}).cluster.token_path

    @property
    def demo_key_path(self) -> Path:
        """File with an API key of the tenant `demo`, mode 0600."""
        return self.state_dir / "demo.key"

    def client_settings(self) -> dict[str, Any]:
        """Arguments for `mooncache.connect`."""
        return {
            "master": self.master_target,
            "token_file": str(self.token_path),
            "state_dir": str(self.state_dir),
        }

    # --- inside ----------------------------------------------------------------------------------------------

    def _usual_start_s(self) -> float:
        return START_ENGINES_S if self.settings.serves else START_POOL_S

    def _take_folder(self) -> None:
        try:
            self.state_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._lock = (self.state_dir / "up.lock").open("w", encoding="ascii")
        except OSError as error:
            raise ConfigInvalid(
                f"The state folder {self.state_dir} cannot be used: {error.strerror}."
            ) from None
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self._lock.close()
            self._lock = None
            raise ConfigInvalid(
                f"A cluster is running in {self.state_dir} already. Stop it (`mooncache down`), or choose another "
                "--state-dir."
            ) from None

    def _prepare(self) -> None:
        config = load(overrides={"cluster.state_dir": str(self.state_dir)})
        _, self.token_created = load_or_create_cluster_token(self.token_path)
        self._run_dir = self._socket_folder()
        forget_interpreter(self.state_dir)
        self.layout = plan(self.settings, config, self.state_dir, self._run_dir, self.run_id, self._ports)
        if self._gateway is not None:
            self._gateway.listener = self._ports.listen(self._gateway.port)
        if self.settings.serves:
            self._write_demo_key()

    def _write_demo_key(self) -> None:
        text = tenant_token(load_cluster_token(self.token_path), DEMO_TENANT).text
        write_whole(self.demo_key_path, text + "\n")

    def _socket_folder(self) -> Path:
        """Folder for the data sockets. A socket's path may have about 100 bytes: a deep state folder gets another."""
        folder = self.state_dir / "run"
        if len(os.fsencode(folder / "node-64.sock")) > UNIX_PATH_MAX:
            return make_socket_folder()
        folder.mkdir(mode=0o700, exist_ok=True)
        return folder

    @property
    def _holder(self) -> str:
        """The socket of the process that holds the nodes' memory; "" when none does."""
        kept = self.settings.keep_memory and self._run_dir is not None
        return str(self._run_dir / HOLDER_SOCKET) if kept and self._run_dir is not None else ""

    @property
    def _gateway(self) -> Part | None:
        """The gateway; None for a pool alone, and on a machine of a larger cluster that has none."""
        gateways = (part for part in self.parts.values() if part.service == ServiceKind.GATEWAY)
        return next(gateways, None)

    def _announce_ready(self) -> None:
        gateway = self._gateway
        if gateway is not None and self._records[gateway.name].state == RunState.GIVEN_UP:
            self._ports.release(gateway.port)  # its answer will not come
        with contextlib.suppress(OSError):  # a full disk must not end the supervision
            self._announce(ready=True)

    def _announce(self, *, ready: bool) -> None:
        tls = load(overrides={"cluster.state_dir": str(self.state_dir)}).tls
        parts = self.parts.items()
        content = {
            "tls_ca": str(tls.ca_file) if tls.enabled and tls.ca_file else None,
            "master_targets": self.master_target.split(","),
            "conductor_target": self.layout.conductor_target,
            "gateway_url": self.layout.gateway_url,
            "pid": os.getpid(),
            "run_id": self.run_id,
            "holder": self._holder,
            "ready": ready,
            "nodes": {name: part.pid for name, part in parts if part.service == ServiceKind.STORE_NODE},
            "parts": {name: part.pid for name, part in parts},
            "metrics": {name: part.metrics for name, part in parts if part.metrics},
            "records": {name: dataclasses.asdict(record) for name, record in self._records.items()},
        }
        write_cluster_file(self.state_dir, content)
