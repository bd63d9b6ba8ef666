"""A pool with an SSD tier for benchmarks: one master, one node, and what its disk has done."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final
from urllib.request import urlopen

from prometheus_client.parser import text_string_to_metric_families

import mooncache
from mooncache.bench.store.ours import start_cluster
from mooncache.cluster.embedded import EmbeddedCluster
from mooncache.errors import NodeUnavailable

NODE: Final = "node-1"
_PREFIX: Final = "mooncache_store_node_"
_CALL_S: Final = 5.0
_WAIT_S: Final = 120.0
_LOOK_S: Final = 0.02


@contextmanager
def ssd_pool(
    capacity_bytes: int, ssd_bytes: int, *, write_bytes_per_s: int = 0, env: dict[str, str] | None = None
) -> Iterator[EmbeddedCluster]:
    """A node with so much memory and so much of the disk below its state folder; 0: no tier."""
    settings = {
        "MOONCACHE_STORE_NODE_SSD_BYTES": str(ssd_bytes),
        "MOONCACHE_STORE_NODE_SSD_WRITE_BYTES_PER_S": str(write_bytes_per_s),
        **(env or {}),
    }
    with start_cluster(nodes=1, capacity_bytes=capacity_bytes, env=settings) as cluster:
        yield cluster


def disk_counters(cluster: EmbeddedCluster, node: str = NODE) -> dict[str, float]:
    """A node's counters by their names without prefix: ssd_written_bytes, ssd_blocks, store_used_bytes and others."""
    with urlopen(f"http://{cluster.parts[node].metrics}/metrics", timeout=_CALL_S) as answer:
        page = answer.read().decode()
    return {
        metric.name.removeprefix(_PREFIX): metric.samples[0].value
        for metric in text_string_to_metric_families(page)
        if metric.name.startswith(_PREFIX) and metric.samples and not metric.samples[0].labels
    }


def put_at_the_disks_pace(
    cluster: EmbeddedCluster, client: mooncache.Client, count: int, block_bytes: int
) -> list[bytes]:
    """Put so many blocks so that hardly one is dropped: a put never waits for a disk. Returns their keys.

    Raises:
        NodeUnavailable: the disk takes no blocks.
    """
    counters = disk_counters(cluster)
    ahead = counters["store_capacity_bytes"] * 15 / 16
    begun = counters["ssd_admitted_bytes"] - counters["store_used_bytes"]
    batch = max(1, min(2 << 20, int(counters["store_capacity_bytes"]) // 32) // block_bytes)
    keys: list[bytes] = []
    while len(keys) < count:
        limit = time.monotonic() + _WAIT_S
        while len(keys) * block_bytes + batch * block_bytes > (
            disk_counters(cluster)["ssd_admitted_bytes"] - begun + ahead
        ):
            if time.monotonic() > limit:
                raise NodeUnavailable("The disk takes no blocks.")
            time.sleep(_LOOK_S)
        fresh = [os.urandom(32) for _ in range(min(batch, count - len(keys)))]
        client.put_many(fresh, [os.urandom(block_bytes) for _ in fresh]).raise_for_errors()
        keys += fresh
    return keys


def wait_for(cluster: EmbeddedCluster, until: Callable[[dict[str, float]], bool], timeout_s: float) -> float:
    """Seconds until the counters are so. Raises NodeUnavailable after `timeout_s`."""
    begun = time.monotonic()
    while not until(disk_counters(cluster)):
        if time.monotonic() - begun > timeout_s:
            raise NodeUnavailable(f"The node's counters did not change within {timeout_s:.0f} s.")
        time.sleep(_LOOK_S)
    return time.monotonic() - begun


def settle(cluster: EmbeddedCluster, node: str = NODE) -> None:
    """Wait until the disk has written what it has taken."""
    last = -1.0
    for _ in range(round(_WAIT_S)):
        written = disk_counters(cluster, node)["ssd_written_bytes"]
        if written == last:
            return
        last = written
        time.sleep(0.5)
