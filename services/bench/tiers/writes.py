"""What a disk wears: bytes written over bytes of blocks that were admitted, and a budget that is kept.

The disk is written several times over, so that segments are given up and blocks that were read move to newer ones.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Final

import mooncache
from mooncache.bench.ssd_pool import disk_counters, put_at_the_disks_pace, settle, ssd_pool
from mooncache.reporting.rows import Row, bar_row

_OVER_ADMITTED: Final = 1.1
_OVER_BUDGET: Final = 1.05
_BURST_S: Final = 60  # of what was not written; see WriteBudget
_BLOCK: Final = 64 << 10
_SMALL: Final = 4 << 10
_READ_EVERY: Final = 4


def run(quick: bool, progress: Callable[[str], None]) -> list[Row]:
    """Rows for two sizes of blocks, and for the budget."""
    memory_bytes = (16 if quick else 64) << 20
    rows: list[Row] = []
    for block_bytes in (_BLOCK, _SMALL):
        progress(f"blocks of {block_bytes >> 10} KiB")
        rows += over_admitted(memory_bytes, block_bytes, 2 if quick else 3)
    return rows + _budget(memory_bytes, 3.0 if quick else 40.0, progress)


def over_admitted(memory_bytes: int, block_bytes: int, laps: int) -> list[Row]:
    disk_bytes = 4 * memory_bytes
    with (
        ssd_pool(memory_bytes, disk_bytes) as pool,
        mooncache.connect(**pool.client_settings(), timeout_s=60.0) as client,
    ):
        count = disk_bytes // block_bytes
        for _ in range(laps):
            keys = put_at_the_disks_pace(pool, client, count, block_bytes)
            client.get_many(keys[: count // 2 : _READ_EVERY])  # these move on when their segment is given up
        settle(pool)
        counters = disk_counters(pool)
    name = f"blocks of {block_bytes >> 10} KiB: bytes"
    admitted = counters["ssd_admitted_bytes"]
    return [
        Row(f"{name} admitted", admitted / 1e6, "MB"),
        Row(
            f"{name.removesuffix(' bytes')} blocks that moved to a newer segment",
            counters["ssd_kept_blocks"],
            "",
        ),
        bar_row(
            f"{name} written to the disk",
            counters["ssd_written_bytes"] / 1e6,
            "MB",
            against="admitted",
            reference=admitted / 1e6,
            at_most=_OVER_ADMITTED,
        ),
    ]


def _budget(memory_bytes: int, seconds: float, progress: Callable[[str], None]) -> list[Row]:
    """Puts without a pause; the bytes of a time that begins when what a budget saves up is used."""
    budget = memory_bytes // 16
    with (
        ssd_pool(memory_bytes, 16 * memory_bytes, write_bytes_per_s=budget) as pool,
        mooncache.connect(**pool.client_settings(), timeout_s=60.0) as client,
    ):
        progress("using what the budget has saved up")
        _put_for(client, lambda: disk_counters(pool)["ssd_written_bytes"] > 0.97 * budget * _BURST_S)
        progress(f"{seconds:.0f} s with a budget")
        _put_for(client, _after(2.0))
        before, begun_s = disk_counters(pool)["ssd_written_bytes"], time.monotonic()
        _put_for(client, _after(seconds))
        rate = (disk_counters(pool)["ssd_written_bytes"] - before) / (time.monotonic() - begun_s)
    return [
        Row("write budget", budget / 1e6, "MB/s"),
        bar_row(
            "written to the disk with that budget, and more than it in puts",
            rate / 1e6,
            "MB/s",
            against="the budget",
            reference=budget / 1e6,
            at_most=_OVER_BUDGET,
        ),
    ]


def _after(seconds: float) -> Callable[[], bool]:
    until_s = time.monotonic() + seconds
    return lambda: time.monotonic() > until_s


def _put_for(client: mooncache.Client, ended: Callable[[], bool]) -> None:
    """Blocks that are read once, hence worth a write, without a pause."""
    batch = max(1, (1 << 20) // _BLOCK)
    while not ended():
        keys = [os.urandom(32) for _ in range(batch)]
        client.put_many(keys, [os.urandom(_BLOCK) for _ in keys]).raise_for_errors()
        client.get_many(keys)
