"""The master is killed while the pool has many blocks: gets that fail, and the time until the directory is whole again.

The pool is one of small blocks. The master is started again at once, as a supervisor does; the time to start its
process is part of the figure. Readers read blocks of all nodes meanwhile.
"""

from __future__ import annotations

import asyncio
import os
import random
import time
from collections.abc import Callable
from typing import Final

import mooncache
from mooncache.bench.block_reads import BlockReads
from mooncache.bench.store.ours import start_cluster
from mooncache.client.master_link import MasterLink
from mooncache.client.options import ClientOptions
from mooncache.cluster.embedded import EmbeddedCluster
from mooncache.errors import DeadlineExceeded, MooncacheError
from mooncache.proto.v1 import master_pb2
from mooncache.reporting.rows import Row, bar_row
from mooncache.runtime.clock import SystemClock

_NODES: Final = 4
_BLOCK: Final = 64
_ROOM: Final = 5120  # bytes of an arena for each block, with the unevenness of placement
_BATCH: Final = 8192
_READ_KEYS: Final = 512
_BEFORE_S: Final = 2.0
_POLL_S: Final = 0.02
_WHOLE_MAX_S: Final = 120.0
_WHOLE_BAR_S: Final = 3.0


async def _count(link: MasterLink) -> int:
    answer = await link.call("GetUsage", master_pb2.GetUsageRequest(), master_pb2.GetUsageResponse, 2.0)
    return sum(tenant.block_count for tenant in answer.tenants)


async def _await_count(link: MasterLink, blocks: int) -> tuple[float, float]:
    """When the master answered first, and when it knew of so many blocks. Raises DeadlineExceeded."""
    first_s, end_s = 0.0, time.monotonic() + _WHOLE_MAX_S
    while time.monotonic() < end_s:
        try:
            found = await _count(link)
        except MooncacheError:
            found = -1
        now_s = time.monotonic()
        if found >= 0 and not first_s:
            first_s = now_s
        if found >= blocks:
            return first_s, now_s
        await asyncio.sleep(_POLL_S)
    raise DeadlineExceeded(f"The directory did not have {blocks} blocks within {_WHOLE_MAX_S:g} s.")


async def _settled(link: MasterLink) -> int:
    """The number of blocks, once it stays the same: full nodes may have evicted some."""
    last, end_s = -1, time.monotonic() + _WHOLE_MAX_S
    while time.monotonic() < end_s:
        found = await _count(link)
        if found == last and found > 0:
            return found
        last = found
        await asyncio.sleep(_BEFORE_S)
    raise DeadlineExceeded(f"The directory still changed after {_WHOLE_MAX_S:g} s without a put.")


async def _kill_and_wait(pool: EmbeddedCluster) -> tuple[int, float, float]:
    """Blocks, and seconds from the kill to the first answer and to the whole directory."""
    options = ClientOptions.gather(**pool.client_settings())
    link = MasterLink(options.targets, options.master_channel, SystemClock(), random.Random())
    try:
        blocks = await _settled(link)
        killed_s = time.monotonic()
        pool.kill("master")
        pool.restart("master")
        first_s, whole_s = await _await_count(link, blocks)
    finally:
        await link.close()
    return blocks, first_s - killed_s, whole_s - killed_s


def run(quick: bool, progress: Callable[[str], None]) -> list[Row]:
    """Failed gets, and seconds until the directory is whole."""
    blocks = 100_000 if quick else 1_000_000
    with (
        start_cluster(_NODES, blocks * _ROOM // _NODES + (64 << 20)) as pool,
        mooncache.connect(**pool.client_settings(), shm=False, timeout_s=20.0) as client,
    ):
        progress(f"{blocks} blocks are stored")
        payload = os.urandom(_BLOCK)
        for at in range(0, blocks, _BATCH):
            keys = [f"block-{number}" for number in range(at, min(blocks, at + _BATCH))]
            client.put_many(keys, [payload] * len(keys)).raise_for_errors()
        reads = BlockReads(client, [f"block-{number}" for number in range(0, blocks, blocks // _READ_KEYS)])
        try:
            progress("the master is killed and started again")
            known, first_s, whole_s = asyncio.run(_kill_and_wait(pool))
        finally:
            reads.end()
    return [
        Row("blocks in the directory", float(known), ""),
        Row("from the kill to the next master's first answer", first_s, "s"),
        bar_row("from the kill to the whole directory", whole_s, "s", at_most=_WHOLE_BAR_S),
        Row("gets meanwhile", float(reads.count), ""),
        bar_row("gets that failed", float(reads.failed), "", at_most=0.0),
    ]
