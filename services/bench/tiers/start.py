"""A node that is killed and starts again: how fast its index is rebuilt, what it takes, and what is found.

The rebuild is measured on a device alone, in processor time and by the clock, with a million small blocks whose footers
are on the disk. What is found is measured on a real node: all blocks that were on its disk are asked for again.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from typing import Final

import mooncache
from mooncache.bench.ssd_pool import NODE, put_at_the_disks_pace, settle, ssd_pool
from mooncache.client.native_call import call_native
from mooncache.reporting.rows import Row, bar_row

_RECORDS: Final = 2_000_000
_QUICK_RECORDS: Final = 100_000
_PER_CORE_S: Final = 1e6
_PER_BLOCK: Final = 64.0
_FOUND: Final = 0.99
_BLOCK: Final = 256 << 10
_START_S: Final = 60.0
_PAGE: Final = 64


def run(quick: bool, progress: Callable[[str], None]) -> list[Row]:
    """Records a second, bytes of memory a block, and the hit ratio after `kill -9` over before."""
    records = _QUICK_RECORDS if quick else _RECORDS
    progress(f"{records:,} records")
    with tempfile.TemporaryDirectory(prefix="mooncache-bench-tiers-") as folder:
        found = index_rebuild(folder, records)
    memory_bytes = (16 if quick else 128) << 20
    with ssd_pool(memory_bytes, 8 * memory_bytes) as pool:
        settings = pool.client_settings()
        with mooncache.connect(**settings, timeout_s=60.0) as client:
            progress("filling the disk")
            keys = put_at_the_disks_pace(pool, client, 6 * memory_bytes // _BLOCK, _BLOCK)
            settle(pool)
            on_disk = [key for key, tier in zip(keys, _tiers(client, keys), strict=True) if tier == "ssd"]
        progress("kill -9, and a start")
        pool.kill(NODE)
        pool.restart(NODE)
        with mooncache.connect(**settings, timeout_s=60.0) as client:
            gap_s = _until_it_serves(client, on_disk)
            again = _hits(client, on_disk)
            of_all = _hits(client, keys)
    return [
        Row("records of the disk", float(found["records"]), ""),
        bar_row(
            "index rebuilt at start, for each second of a processor",
            found["records"] / found["cpu_s"],
            "1/s",
            at_least=_PER_CORE_S,
        ),
        Row("index rebuilt at start, by the clock", found["records"] / found["wall_s"], "1/s"),
        bar_row(
            "memory for each block on the disk",
            found["index_bytes"] / found["records"],
            "bytes",
            at_most=_PER_BLOCK,
        ),
        Row("blocks that were on the disk alone when the node was killed", float(len(on_disk)), ""),
        bar_row(
            "of these, found and read after its start",
            float(again),
            "",
            against="before",
            reference=float(len(on_disk)) or None,
            at_least=_FOUND,
        ),
        Row("from its start until a block of the disk was read", gap_s, "s"),
        Row("of all blocks, with those that were in memory alone", of_all / len(keys), "of 1"),
    ]


def index_rebuild(folder: str, records: int) -> dict[str, float]:
    """What a start on so many small blocks takes. Raises MooncacheError when the disk is refused."""
    from mooncache import _native

    return call_native(_native.disk_start_benchmark, folder, records)


def _until_it_serves(client: mooncache.Client, keys: list[bytes]) -> float:
    """Seconds from here until one of the blocks is found, or so long as that may take."""
    begun_s = time.monotonic()
    while time.monotonic() - begun_s < _START_S and client.get_many(keys[:_PAGE]).hits == 0:
        time.sleep(0.05)
    return time.monotonic() - begun_s


def _tiers(client: mooncache.Client, keys: list[bytes]) -> list[str]:
    found = client.stat_many(keys)
    return [stat.tier if stat is not None else "" for stat in found]


def _hits(client: mooncache.Client, keys: list[bytes]) -> int:
    return sum(client.get_many(keys[at : at + _PAGE]).hits for at in range(0, len(keys), _PAGE))
