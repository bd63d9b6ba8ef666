"""This project's side of the benchmark: a real cluster in processes of its own, used through the public client."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import mooncache
from mooncache.bench.store.options import StoreBenchOptions
from mooncache.bench.worker import WorkerError
from mooncache.cluster.embedded import ClusterSettings, EmbeddedCluster

_START_TIMEOUT_S = 60.0


class OurClient:
    """Times single calls of the public client, in seconds, and refuses to time a call that failed."""

    def __init__(self, client: mooncache.Client) -> None:
        self.client = client

    def put_batch_s(self, keys: Sequence[bytes], sources: Sequence[memoryview]) -> float:
        started = time.perf_counter()
        result = self.client.put_many(keys, sources)
        elapsed = time.perf_counter() - started
        result.raise_for_errors()
        return elapsed

    def get_batch_s(self, keys: Sequence[bytes], targets: Sequence[memoryview]) -> float:
        started = time.perf_counter()
        result = self.client.get_many_into(keys, targets)
        elapsed = time.perf_counter() - started
        result.raise_for_errors()
        if result.hits != len(keys):
            raise WorkerError(f"{len(keys) - result.hits} of {len(keys)} blocks were not found")
        return elapsed

    def put_s(self, key: bytes, source: memoryview) -> float:
        started = time.perf_counter()
        self.client.put(key, source)
        return time.perf_counter() - started

    def get_s(self, key: bytes, target: memoryview) -> float:
        started = time.perf_counter()
        found = self.client.get_into(key, target)
        elapsed = time.perf_counter() - started
        if found is None:
            raise WorkerError("a block that was just put was not found")
        return elapsed

    def match_s(self, keys: Sequence[bytes]) -> float:
        started = time.perf_counter()
        result = self.client.match(keys)
        elapsed = time.perf_counter() - started
        if result.leading_blocks != len(keys):
            raise WorkerError(f"match found {result.leading_blocks} of {len(keys)} keys")
        return elapsed

    def exists_s(self, keys: Sequence[bytes]) -> float:
        started = time.perf_counter()
        present = self.client.exists_many(keys)
        elapsed = time.perf_counter() - started
        if not all(present):
            raise WorkerError("exists misses keys that were put")
        return elapsed

    def remove(self, keys: Sequence[bytes]) -> None:
        self.client.remove_many(keys).raise_for_errors()


@contextmanager
def start_cluster(
    nodes: int, capacity_bytes: int, env: Mapping[str, str] | None = None, *, keep_memory: bool = False
) -> Iterator[EmbeddedCluster]:
    """What `mooncache up` starts, in a temporary state folder: a master and store nodes as real processes."""
    with tempfile.TemporaryDirectory(prefix="mooncache-bench-") as folder:
        settings = ClusterSettings(
            state_dir=Path(folder),
            nodes=nodes,
            capacity_bytes=capacity_bytes,
            keep_memory=keep_memory,
            port=0,
            log_level="warning",
            extra_env=tuple((env or {}).items()),
        )
        cluster = EmbeddedCluster(settings)
        cluster.start(_START_TIMEOUT_S)
        try:
            yield cluster
        finally:
            cluster.stop()


@contextmanager
def connect(cluster: EmbeddedCluster, *, shared_memory: bool) -> Iterator[OurClient]:
    with mooncache.connect(**cluster.client_settings(), shm=shared_memory, timeout_s=60.0) as client:
        yield OurClient(client)


@contextmanager
def start_node(options: StoreBenchOptions) -> Iterator[EmbeddedCluster]:
    """One store node with room for several rounds of blocks, and its master."""
    payload = options.block_bytes * options.block_count
    with start_cluster(nodes=1, capacity_bytes=max(512 << 20, 4 * payload)) as cluster:
        yield cluster
