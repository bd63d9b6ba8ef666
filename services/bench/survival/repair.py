"""A node dies: the rate at which its blocks get their second copy again, over the limit, and what readers notice.

Three nodes with two copies of each block. Small blocks are read over and over, before the death and while copies are
made; the rate is taken from the first copy to the last.
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
from mooncache.errors import DeadlineExceeded
from mooncache.proto.v1 import master_pb2
from mooncache.reporting.rows import Row, bar_row
from mooncache.runtime.clock import SystemClock

_BLOCK: Final = 1 << 20
_BATCH: Final = 32
_SMALL: Final = 4096
_SMALL_KEYS: Final = 256
_BEFORE_S: Final = 5.0
_POLL_S: Final = 0.2
_REPAIR_MAX_S: Final = 300.0
_RATE_OFF: Final = 0.10
_P99_RATIO: Final = 1.2


def run(quick: bool, progress: Callable[[str], None]) -> list[Row]:
    """Rate of the copies over the limit, and the 99th percentile of small reads meanwhile over before."""
    total = (128 if quick else 1024) << 20
    limit = (16 if quick else 64) << 20
    env = {
        "MOONCACHE_MASTER_REPLICAS": "2",
        "MOONCACHE_MASTER_REPAIR_BYTES_PER_S": str(limit),
        "MOONCACHE_MASTER_REPAIR_GRACE_S": "1",
    }
    with (
        start_cluster(3, total + total // 2 + (64 << 20), env) as pool,
        mooncache.connect(**pool.client_settings(), shm=False, timeout_s=60.0) as client,
    ):
        progress("blocks in two copies each")
        small = [f"small-{number}" for number in range(_SMALL_KEYS)]
        client.put_many(small, [bytes(_SMALL)] * _SMALL_KEYS, replicas=2).raise_for_errors()
        payload = os.urandom(_BLOCK)
        keys = [f"large-{number}" for number in range(3 * total // (2 * _BLOCK))]  # two thirds lose a copy
        for at in range(0, len(keys), _BATCH):
            part = keys[at : at + _BATCH]
            client.put_many(part, [payload] * len(part), replicas=2).raise_for_errors()
        reader = BlockReads(client, small)
        try:
            begun_s = time.monotonic()
            progress("reads before")
            asyncio.run(_watch(pool, _BEFORE_S, until_whole=False))
            killed_s = time.monotonic()
            pool.kill("node-1")
            progress("node-1 is dead; copies are made")
            first_s, last_s, copied = asyncio.run(_watch(pool, _REPAIR_MAX_S, until_whole=True))
        finally:
            reader.end()
    rate = copied / max(1e-9, last_s - first_s)
    before_s, meanwhile_s = reader.p99_s(begun_s, killed_s), reader.p99_s(first_s, last_s)
    return [
        Row("copied after the death", copied / (1 << 20), "MiB"),
        Row("from the death to the last copy", last_s - killed_s, "s"),
        bar_row(
            "rate of copies",
            rate / (1 << 20),
            "MiB/s",
            against="the limit",
            reference=limit / (1 << 20),
            at_least=1 - _RATE_OFF,
        ),
        bar_row(
            "the same, not above",
            rate / (1 << 20),
            "MiB/s",
            against="the limit",
            reference=limit / (1 << 20),
            at_most=1 + _RATE_OFF,
        ),
        Row("P99 of 4 KiB gets before", before_s * 1e3, "ms"),
        bar_row(
            "P99 of 4 KiB gets while copies are made",
            meanwhile_s * 1e3,
            "ms",
            against="before",
            reference=before_s * 1e3,
            at_most=_P99_RATIO,
        ),
        Row("reads without an answer", float(reader.failed), ""),
    ]


async def _watch(pool: EmbeddedCluster, limit_s: float, *, until_whole: bool) -> tuple[float, float, int]:
    """When the first and the last copy was there, and the bytes between. Raises DeadlineExceeded.

    until_whole: False: ask for so long, whatever the answers are (the process that reads is as busy then).
    """
    options = ClientOptions.gather(**pool.client_settings())
    link = MasterLink(options.targets, options.master_channel, SystemClock(), random.Random())
    end_s = time.monotonic() + limit_s
    first_s = first_bytes = last_s = last_bytes = 0.0
    try:
        base = (await _figures(link)).copied_bytes
        while time.monotonic() < end_s:
            found, now_s = await _figures(link), time.monotonic()
            if found.copied_bytes > max(base, last_bytes):
                last_s, last_bytes = now_s, found.copied_bytes
                if not first_s:
                    first_s, first_bytes = now_s, found.copied_bytes
            if until_whole and first_s and found.state == master_pb2.REPAIR_STATE_WHOLE:
                return first_s, last_s, int(last_bytes - first_bytes)
            await asyncio.sleep(_POLL_S)
    finally:
        await link.close()
    if until_whole:
        raise DeadlineExceeded(f"The blocks did not all have two copies within {limit_s:g} s.")
    return first_s, last_s, 0


async def _figures(link: MasterLink) -> master_pb2.GetRepairResponse:
    return await link.call("GetRepair", master_pb2.GetRepairRequest(), master_pb2.GetRepairResponse, 5.0)
