"""The pool of a store of ours: one that the kit starts and may break, or one that runs and is left alone."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import tempfile
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final

import mooncache
from mooncache.bench.ssd_pool import settle
from mooncache.chaos.shell.processes import flip_bits, flip_file
from mooncache.cluster.embedded import ClusterSettings, EmbeddedCluster
from mooncache.config import parse_size_bytes
from mooncache.conformance.core.verdicts import NotOfferedError
from mooncache.errors import InvalidArgument

CALL_S: Final = 5.0
_START_S: Final = 120.0
_FLIP_TRIES: Final = 20_000
_DISK_FLIP_TRIES: Final = 400  # of each file: some records stay whole
_FILLER: Final = 64 << 10
_FILLED: Final = 3  # times the memory: what was there before lies on the disks alone
_NODE: Final = "node-1"
_KNOWN: Final = {"state_dir", "nodes", "capacity", "ssd", "shm", "replicas"}


def _cut_file(descriptor: int, rng: random.Random) -> int:
    size = os.fstat(descriptor).st_size
    left = rng.randrange(size // 8) // 4096 * 4096 if size >= 8 else 0
    os.ftruncate(descriptor, left)
    return size - left


class PoolTarget:
    """What our stores have in common, made of their configuration:

    state_dir: of the cluster that runs on this machine and is left alone; without it a pool is started.
    nodes, capacity (of each node): of the pool that is started. ssd: bytes of the disk of each node; with them it is
    the disks that are damaged, while no node runs, and what is read afterwards comes from there alone.
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
        self._capacity_bytes = self._memory_bytes = self._ssd_bytes = 0
        if config.get("state_dir"):
            self.state_dir = Path(str(config["state_dir"])).expanduser()
            return
        self._folder = tempfile.TemporaryDirectory(prefix="mooncache-conformance-")
        self.state_dir = Path(self._folder.name)
        nodes, capacity = int(config.get("nodes", 2)), parse_size_bytes(str(config.get("capacity", "32MiB")))
        self._ssd_bytes = parse_size_bytes(str(config["ssd"])) if config.get("ssd") else 0
        self._memory_bytes, self._capacity_bytes = nodes * capacity, nodes * (capacity + self._ssd_bytes)
        settings = ClusterSettings(
            self.state_dir,
            nodes=nodes,
            capacity_bytes=capacity,
            ssd_bytes=self._ssd_bytes,
            port=0,
            extra_env=(
                ("MOONCACHE_METRICS_ENABLED", "true"),
            ),  # they say when the disks have written everything
        )
        self._cluster = EmbeddedCluster(settings)
        # A node ends with the thread that started it, and each promise has a thread of its own.
        self._starter = ThreadPoolExecutor(1, "conformance nodes")
        try:
            self._starter.submit(self._cluster.start, _START_S).result()
        except BaseException:
            self._starter.shutdown()
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
        """Flip bits in the arenas of every node, or in the files of their disks."""
        nodes = self._nodes()
        if self._ssd_bytes:
            return self._harm_disks(lambda descriptor: flip_file(descriptor, _DISK_FLIP_TRIES, rng))
        return sum(flip_bits(self._owned().parts[name].pid, _FLIP_TRIES, rng) for name in nodes)

    def truncate(self, rng: random.Random) -> int:
        """Cut off the ends of the files of every node's disk."""
        self._owned()
        if not self._ssd_bytes:
            raise NotOfferedError(
                "the pool keeps its blocks in memory, of which no end can be cut off; --set ssd=SIZE"
            )
        return self._harm_disks(lambda descriptor: _cut_file(descriptor, rng))

    def _nodes(self) -> list[str]:
        return [name for name in self._owned().parts if name.startswith("node-")]

    def _harm_disks(self, harm: Callable[[int], int]) -> int:
        """Push all blocks down, kill the nodes, harm their files, and start them again."""
        cluster, nodes = self._owned(), self._nodes()
        with mooncache.connect(**self.client_settings()) as client:
            # A put does not wait for a disk, which drops what it is late for.
            at_once = max(1, self._memory_bytes // 2 // _FILLER)
            for number in range(_FILLED * self._memory_bytes // _FILLER):
                client.put(os.urandom(32), os.urandom(_FILLER))
                if number % at_once == 0:
                    for name in nodes:
                        settle(cluster, name)
        for name in nodes:
            settle(cluster, name)
            cluster.kill(name)
        harmed = 0
        for path in sorted(file for name in nodes for file in (self.state_dir / "ssd" / name).rglob("*")):
            if path.is_file():
                descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
                try:
                    harmed += harm(descriptor)
                finally:
                    os.close(descriptor)
        self._start_again(nodes)
        return harmed

    def _start_again(self, nodes: list[str]) -> None:
        for name in nodes:
            self._starter.submit(self._owned().restart, name).result()
        self._owned().wait_ready(_START_S)

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
        self._start_again([_NODE])

    def close(self) -> None:
        """End the pool if it was started here."""
        if self._cluster is not None:
            with contextlib.suppress(KeyError):
                self._cluster.parts[_NODE].send(signal.SIGCONT)
            self._cluster.stop()
            self._starter.shutdown()
        if self._folder is not None:
            self._folder.cleanup()

    def _owned(self) -> EmbeddedCluster:
        if self._cluster is None:
            raise NotOfferedError(
                "the pool runs already and is left as it is; without state_dir one is started"
            )
        return self._cluster
