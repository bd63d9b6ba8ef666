"""The cost of knowing: prefix index, directory rebuild after a kill of the master, memory per block."""

from __future__ import annotations

import asyncio
import hashlib
import random
import threading
import time
from collections.abc import Callable, Iterator

from mooncache import _native
from mooncache.bench.store.options import StoreBenchOptions
from mooncache.bench.store.ours import OurClient, connect, start_cluster
from mooncache.bench.worker import WorkerError, resident_bytes
from mooncache.client.master_link import MasterLink
from mooncache.client.options import ClientOptions
from mooncache.cluster.embedded import EmbeddedCluster
from mooncache.errors import MooncacheError
from mooncache.proto.v1 import master_pb2
from mooncache.reporting.rows import Report, bar_row
from mooncache.runtime.clock import SystemClock

Progress = Callable[[str], None]
StatusCheck = Callable[[master_pb2.GetStatusResponse], bool]
_BATCH = 4096
_SETTLE_S = 120.0


def count_text(number: int) -> str:
    """1000000 -> "1 M"."""
    for size, letter in ((1_000_000, "M"), (1_000, "k")):
        if number >= size and number % size == 0:
            return f"{number // size} {letter}"
    return str(number)


def index_rows(report: Report, options: StoreBenchOptions, progress: Progress) -> None:
    """Block operations of the prefix index on one core, at growing sizes and numbers of instances."""
    cases = [(blocks, options.index_instances) for blocks in options.index_blocks]
    cases += [(options.index_blocks[-1], nodes) for nodes in options.node_counts]
    for blocks, instances in cases:
        label = f"index {count_text(blocks)} blocks, {count_text(instances)} instances"
        progress(label)
        figures = _native.index_benchmark(blocks, instances, max(2_000_000, 2 * blocks))
        bar = 10e6 if instances == options.index_instances else None
        for op in ("apply", "locate", "match"):
            report.add(bar_row(f"{label}: {op}", figures[f"{op}_per_s"], "blocks/s", at_least=bar))
        report.add(bar_row(f"{label}: memory", figures["bytes_per_block"], "bytes/block"))


def keys_of(round_number: int, count: int) -> Iterator[list[bytes]]:
    """Batches of distinct keys, the same ones every time."""
    for first in range(0, count, _BATCH):
        numbers = range(first, min(count, first + _BATCH))
        yield [hashlib.sha256(b"%d:%d" % (round_number, number)).digest() for number in numbers]


def _fill(client: OurClient, round_number: int, count: int, block_bytes: int, progress: Progress) -> None:
    block = memoryview(bytearray(block_bytes))
    done = 0
    for keys in keys_of(round_number, count):
        client.put_batch_s(keys, [block] * len(keys))
        done += len(keys)
        if done % (_BATCH * 16) == 0:
            progress(f"storing {count_text(count)} blocks: {done}")


async def _poll_status(cluster: EmbeddedCluster, accept: StatusCheck, timeout_s: float) -> float:
    """Seconds until the master's status is acceptable."""
    options = ClientOptions.gather(**cluster.client_settings())
    link = MasterLink(options.targets, options.master_channel, SystemClock(), random.Random())
    started = time.monotonic()
    try:
        while time.monotonic() - started < timeout_s:
            try:
                status = await link.call_once(
                    "GetStatus", master_pb2.GetStatusRequest(), master_pb2.GetStatusResponse, 1.0
                )
                if accept(status):
                    return time.monotonic() - started
            except MooncacheError:
                pass  # it is being restarted: that is what is timed
            await asyncio.sleep(0.02)
    finally:
        await link.close()
    raise WorkerError(f"the directory was not whole within {timeout_s:.0f} s")


class _ReadingThread(threading.Thread):
    """Goes on reading blocks while the master is away and counts what it gets."""

    def __init__(self, client: OurClient, keys: list[bytes], block_bytes: int) -> None:
        super().__init__(daemon=True)
        self._client, self._keys = client, keys
        self._buffer = memoryview(bytearray(block_bytes))
        self._halt = threading.Event()
        self.served = 0
        self.failed = 0

    def run(self) -> None:
        # paced: it shows that gets are served, it must not take the processor from the rebuild
        while not self._halt.wait(0.002):
            key = self._keys[self.served % len(self._keys)]
            try:
                self._client.get_s(key, self._buffer)
                self.served += 1
            except (MooncacheError, WorkerError):
                self.failed += 1

    def finish(self) -> None:
        self._halt.set()
        self.join(10)


def rebuild_rows(report: Report, options: StoreBenchOptions, progress: Progress) -> None:
    """Kill -9 of the master, restart, time until the new one's directory holds every block again."""
    nodes, block_bytes = options.rebuild_nodes, 64
    capacity = max(256 << 20, 2 * 4096 * max(options.rebuild_blocks) // nodes)
    with start_cluster(nodes, capacity) as cluster, connect(cluster, shared_memory=False) as client:
        stored = 0
        for round_number, total in enumerate(options.rebuild_blocks):
            _fill(client, round_number, total - stored, block_bytes, progress)
            stored = total
            label = f"rebuild {count_text(total)} blocks, {nodes} nodes"
            progress(label)
            whole = _is_whole(nodes, total)
            asyncio.run(_poll_status(cluster, whole, _SETTLE_S))
            reader = _ReadingThread(client, next(keys_of(0, 512)), block_bytes)
            reader.start()
            started = time.monotonic()
            cluster.kill("master")
            cluster.restart("master")
            answering_s = asyncio.run(_poll_status(cluster, lambda status: status.leading, _SETTLE_S))
            asyncio.run(_poll_status(cluster, whole, _SETTLE_S))
            total_s = time.monotonic() - started
            reader.finish()
            if reader.served == 0:
                raise WorkerError("no get was served while the master was away")
            bar = 3.0 if total == max(options.rebuild_blocks) else None
            report.add(bar_row(f"{label}: kill to whole", total_s, "s", at_most=bar))
            report.add(bar_row(f"{label}: first answer to whole", total_s - answering_s, "s"))
            report.add(bar_row(f"{label}: gets served meanwhile", reader.served, "gets"))
            report.add(bar_row(f"{label}: gets failed meanwhile", reader.failed, "gets", at_most=0.0))


def _is_whole(nodes: int, blocks: int) -> StatusCheck:
    def accept(status: master_pb2.GetStatusResponse) -> bool:
        return len(status.nodes) == nodes and status.directory_complete and status.block_count == blocks

    return accept


def memory_rows(report: Report, options: StoreBenchOptions, progress: Progress) -> None:
    """Growth of a node's resident memory per stored block, less the blocks' own bytes."""
    progress("resident memory of a node")
    payload = options.memory_blocks * options.memory_block_bytes
    # slots follow from capacity / expected block size: leave room for twice as many
    env = {
        "MOONCACHE_STORE_NODE_EXPECTED_BLOCK_BYTES": str(options.memory_block_bytes),
        "MOONCACHE_STORE_NODE_PREFAULT": "false",  # so that what is resident grows by what is stored
    }
    with start_cluster(1, 2 * payload, env) as cluster, connect(cluster, shared_memory=False) as client:
        pid = cluster.parts["node-1"].pid
        _fill(client, 0, _BATCH, options.memory_block_bytes, progress)
        time.sleep(1.0)
        before = resident_bytes(pid)
        _fill(client, 1, options.memory_blocks, options.memory_block_bytes, progress)
        asyncio.run(_poll_status(cluster, _is_whole(1, options.memory_blocks + _BATCH), _SETTLE_S))
        time.sleep(1.0)
        grown = resident_bytes(pid) - before
    beside = (grown - payload) / options.memory_blocks
    report.add(
        bar_row(
            f"resident beside payload, {count_text(options.memory_blocks)} blocks of {options.memory_block_bytes} B",
            beside,
            "bytes/block",
            at_most=200.0,
        )
    )
