"""The pool of a store of ours: one that the kit starts and may break, or one that runs and is left alone."""

from __future__ import annotations

import contextlib
import random
import signal
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from mooncache.chaos.shell.processes import flip_bits
from mooncache.cluster.embedded import ClusterSettings, EmbeddedCluster
from mooncache.config import parse_size_bytes
from mooncache.conformance.core.verdicts import NotOfferedError
from mooncache.errors import InvalidArgument

CALL_S: Final = 5.0
_START_S: Final = 120.0
_FLIP_TRIES: Final = 20_000
_NODE: Final = "node-1"
_KNOWN: Final = {"state_dir", "nodes", "capacity", "shm", "replicas"}


class PoolTarget:
    """What our stores have in common, made of their configuration:

    state_dir: of the cluster that runs on this machine and is left alone; without it a pool is started.
    nodes, capacity (of each node): of the pool that is started.
    shm: whether clients use shared memory. replicas: copies of each block.
    """

    call_limit_s = CALL_S

    def __init__(self, config: Mapping[str, Any]) -> None:
        if unknown := sorted(set(config) - _KNOWN):
            raise InvalidArgument(
                f"The pool has no setting {unknown[0]!r}. Settings: {', '.join(sorted(_KNOWN))}."
            )
        self.shm = bool(config.get("shm", True))
        self.replicas = int(config.get("replicas", 1))
        self._cluster: EmbeddedCluster | None = None
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self._capacity_bytes = 0
        if config.get("state_dir"):
            self.state_dir = Path(str(config["state_dir"])).expanduser()
            return
        self._folder = tempfile.TemporaryDirectory(prefix="mooncache-conformance-")
        self.state_dir = Path(self._folder.name)
        nodes, capacity = int(config.get("nodes", 2)), parse_size_bytes(str(config.get("capacity", "32MiB")))
        self._capacity_bytes = nodes * capacity
        settings = ClusterSettings(self.state_dir, nodes=nodes, capacity_bytes=capacity, port=0)
        self._cluster = EmbeddedCluster(settings)
        try:
            self._cluster.start(_START_S)
        except BaseException:
            self._folder.cleanup()
            raise

    def client_settings(self) -> dict[str, Any]:
        """Arguments for `mooncache.connect`."""
        return {"state_dir": str(self.state_dir), "shm": self.shm, "timeout_s": CALL_S}

    def attach_config(self) -> dict[str, Any]:
        """The configuration of another client of this pool, which does not own it."""
        return {"state_dir": str(self.state_dir), "shm": self.shm, "replicas": self.replicas}

    def capacity_bytes(self) -> int:
        """Bytes of all nodes that were started."""
        self._owned()
        return self._capacity_bytes

    def damage(self, rng: random.Random) -> int:
        """Flip bits in the arenas of every node."""
        pids = [part.pid for name, part in self._owned().parts.items() if name.startswith("node-")]
        return sum(flip_bits(pid, _FLIP_TRIES, rng) for pid in pids)

    def truncate(self, _rng: random.Random) -> int:
        """Not offered: the arenas of the pool are memory."""
        raise NotOfferedError("the pool keeps its blocks in memory, of which no end can be cut off")

    def stop_node(self) -> None:
        """SIGSTOP for one node."""
        self._owned().parts[_NODE].send(signal.SIGSTOP)

    def resume_node(self) -> None:
        """SIGCONT."""
        self._owned().parts[_NODE].send(signal.SIGCONT)

    def kill_node(self) -> None:
        """SIGKILL for one node."""
        self._owned().kill(_NODE)

    def restart_node(self) -> None:
        """The same node again, once the cluster is whole."""
        self._owned().restart(_NODE)
        self._owned().wait_ready(_START_S)

    def close(self) -> None:
        """End the pool if it was started here."""
        if self._cluster is not None:
            with contextlib.suppress(KeyError):
                self._cluster.parts[_NODE].send(signal.SIGCONT)
            self._cluster.stop()
        if self._folder is not None:
            self._folder.cleanup()

    def _owned(self) -> EmbeddedCluster:
        if self._cluster is None:
            raise NotOfferedError(
                "the pool runs already and is left as it is; without state_dir one is started"
            )
        return self._cluster
