"""A whole pool on this machine: one master and N store nodes, the same binaries as anywhere else.

Idea: the parent prepares a state folder (token, sockets, logs), starts the processes, waits until the master lists all
nodes, and writes `cluster.json` so that clients here need no arguments. A lock on the folder keeps two clusters apart.
Children end with the parent, whatever happens to it.
"""

from __future__ import annotations

import asyncio
import fcntl
import os
import random
import shutil
import signal
import socket
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Self

from mooncache.auth import load_or_create_cluster_token
from mooncache.client.map_keeper import view_of_map
from mooncache.client.master_link import MasterLink
from mooncache.client.options import Options
from mooncache.client.results import NodeView
from mooncache.client.state_dir import remove_cluster_file, write_cluster_file
from mooncache.clock import SystemClock
from mooncache.cluster.processes import Part, describe_exit, stop_all
from mooncache.config import load
from mooncache.errors import ConfigInvalid, Internal, InvalidArgument, MasterUnavailable, MooncacheError
from mooncache.proto.v1 import master_pb2

DEFAULT_PORT = 7700
MAX_NODES = 64
_UNIX_PATH_MAX = 100
_POLL_S = 0.05
_STOP_S = 8.0

Progress = Callable[[str, str], None]
"""Called with the name of a part and what happened to it."""


@dataclass(frozen=True, slots=True)
class ClusterSettings:
    """What an embedded cluster is made of. `port` None takes 7700 when it is free; 0 takes any free port."""

    state_dir: Path
    nodes: int = 2
    capacity_bytes: int = 1 << 30
    host: str = "127.0.0.1"
    port: int | None = None
    log_level: str = "info"
    extra_env: tuple[tuple[str, str], ...] = ()

    def __post_init__(self) -> None:
        if not 1 <= self.nodes <= MAX_NODES:
            raise InvalidArgument(f"nodes must be between 1 and {MAX_NODES}; got {self.nodes}.")
        if self.capacity_bytes < 1 << 20:
            raise InvalidArgument(f"capacity must be at least 1 MiB; got {self.capacity_bytes} bytes.")


class EmbeddedCluster:
    """See the module's text. Use it as a context manager, or `start` and `stop` it."""

    def __init__(self, settings: ClusterSettings) -> None:
        self.settings = settings
        self.state_dir = settings.state_dir.expanduser().absolute()
        self.parts: dict[str, Part] = {}
        self.master_target = ""
        self.token_created = False
        self._lock: IO[str] | None = None
        self._run_dir: Path | None = None

    # --- life ------------------------------------------------------------------------------------------------

    def start(self, timeout_s: float = 30.0, progress: Progress | None = None) -> None:
        """Start everything and return once the master lists every node as active.

        Raises:
            ConfigInvalid: the folder or the port is taken.
            Internal: a part ended while it started; the text has its exit code and last lines.
            MasterUnavailable: not ready in time.
        """
        tell = progress or (lambda _name, _what: None)
        self._take_folder()
        try:
            self._prepare()
            deadline_s = time.monotonic() + timeout_s
            for name in list(self.parts):
                self.parts[name].start()
                tell(name, "started")
            self.wait_ready(max(0.1, deadline_s - time.monotonic()), tell)
            self._announce()
        except BaseException:
            self.stop()
            raise

    def stop(self, timeout_s: float = _STOP_S) -> list[str]:
        """Stop everything; returns the names of parts that had to be killed. Harmless when nothing runs."""
        nodes = [part for name, part in self.parts.items() if name != "master"]
        killed = stop_all(nodes, timeout_s)  # first, while there is a master to say goodbye to
        killed += stop_all([part for name, part in self.parts.items() if name == "master"], timeout_s)
        remove_cluster_file(self.state_dir, os.getpid())
        if self._run_dir is not None and self._run_dir.parent != self.state_dir:
            shutil.rmtree(self._run_dir, ignore_errors=True)
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

    def crashed(self) -> Part | None:
        """The first part that has ended although nobody asked it to."""
        return next((part for part in self.parts.values() if part.exit_code is not None), None)

    def wait_ready(self, timeout_s: float, progress: Progress | None = None) -> tuple[NodeView, ...]:
        """Wait until the master lists every running node as active; returns the nodes."""
        tell = progress or (lambda _name, _what: None)
        return asyncio.run(self._wait_ready(timeout_s, tell))

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
        return self.state_dir / "cluster.token"

    def client_settings(self) -> dict[str, Any]:
        """Arguments for `mooncache.connect`."""
        return {
            "master": self.master_target,
            "token_file": str(self.token_path),
            "state_dir": str(self.state_dir),
        }

    # --- inside ----------------------------------------------------------------------------------------------

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
                f"A cluster is running in {self.state_dir} already. Stop it, or choose another --state-dir."
            ) from None

    def _prepare(self) -> None:
        settings = self.settings
        _, self.token_created = load_or_create_cluster_token(self.token_path)
        port = choose_port(settings.host, settings.port)
        self.master_target = f"{settings.host}:{port}"
        self._run_dir = self._socket_folder()
        common = {
            "MOONCACHE_CLUSTER_STATE_DIR": str(self.state_dir),
            "MOONCACHE_CLUSTER_MASTER_TARGETS": self.master_target,
            "MOONCACHE_LOGGING_FORMAT": "json",
            "MOONCACHE_LOGGING_LEVEL": settings.log_level,
            **dict(settings.extra_env),
        }
        logs = self.state_dir / "logs"
        master_env = {"MOONCACHE_MASTER_HOST": settings.host, "MOONCACHE_MASTER_PORT": str(port)}
        self.parts["master"] = Part(
            "master", "mooncache.master", {**common, **master_env}, logs / "master.log"
        )
        for number in range(1, settings.nodes + 1):
            name = f"node-{number}"
            env = {
                "MOONCACHE_STORE_NODE_NODE_ID": name,
                "MOONCACHE_STORE_NODE_HOST": settings.host,
                "MOONCACHE_STORE_NODE_DATA_HOST": settings.host,
                "MOONCACHE_STORE_NODE_CAPACITY_BYTES": str(settings.capacity_bytes),
                "MOONCACHE_STORE_NODE_UNIX_PATH": str(self._run_dir / f"{name}.sock"),
            }
            self.parts[name] = Part(name, "mooncache.store_node", {**common, **env}, logs / f"{name}.log")

    def _socket_folder(self) -> Path:
        """Folder for the data sockets. A socket's path may have about 100 bytes: a deep state folder gets another."""
        folder = self.state_dir / "run"
        if len(os.fsencode(folder / "node-64.sock")) > _UNIX_PATH_MAX:
            return Path(tempfile.mkdtemp(prefix="mooncache-"))
        folder.mkdir(mode=0o700, exist_ok=True)
        return folder

    def _announce(self) -> None:
        tls = load().tls
        content = {
            "tls_ca": str(tls.ca_file) if tls.enabled and tls.ca_file else None,
            "master_targets": [self.master_target],
            "pid": os.getpid(),
            "nodes": {name: part.pid for name, part in self.parts.items() if name != "master"},
        }
        write_cluster_file(self.state_dir, content)

    async def _wait_ready(self, timeout_s: float, tell: Progress) -> tuple[NodeView, ...]:
        config = load(overrides={"cluster.state_dir": str(self.state_dir)})
        options = Options.gather(master=self.master_target, token_file=str(self.token_path), config=config)
        link = MasterLink(options.targets, options.master_channel, SystemClock(), random.Random())
        wanted = {name for name, part in self.parts.items() if name != "master" and part.exit_code is None}
        deadline_s = time.monotonic() + timeout_s
        seen: set[str] = set()
        try:
            while True:
                self._refuse_crash()
                nodes = await _active_nodes(link)
                for node in nodes:
                    if node.node_id not in seen:
                        seen.add(node.node_id)
                        tell(node.node_id, "ready")
                if wanted <= {node.node_id for node in nodes}:
                    return nodes
                if time.monotonic() >= deadline_s:
                    missing = ", ".join(sorted(wanted - seen)) or "the master"
                    raise MasterUnavailable(
                        f"Not ready after {timeout_s:g} s: {missing}. See {self.state_dir}/logs."
                    )
                await asyncio.sleep(_POLL_S)
        finally:
            await link.close()

    def _refuse_crash(self) -> None:
        part = self.crashed()
        if part is not None and part.exit_code is not None:
            raise Internal(f"{part.name} ended with {describe_exit(part.exit_code)}.\n{part.log_tail()}")


async def _active_nodes(link: MasterLink) -> tuple[NodeView, ...]:
    """Active nodes of the current map; none while the master does not answer yet."""
    try:
        response = await link.call_once("GetClusterMap", master_pb2.GetClusterMapRequest(), 1.0)
    except MooncacheError:
        return ()
    return tuple(node for node in view_of_map(response.map).nodes if node.state == "active")


def choose_port(host: str, port: int | None) -> int:
    """The master's port: the given one, or 7700 when it is free, or any free one.

    Raises:
        ConfigInvalid: the given port cannot be used.
    """
    for candidate in (DEFAULT_PORT, 0) if port is None else (port,):
        with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((host, candidate))
            except OSError as error:
                if port is None:
                    continue
                reason = error.strerror
                raise ConfigInvalid(
                    f"Port {candidate} on {host} cannot be used: {reason}. Choose another --port."
                ) from None
            return int(probe.getsockname()[1])
    raise ConfigInvalid(f"No free port on {host}.")
