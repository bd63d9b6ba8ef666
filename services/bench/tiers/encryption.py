"""What encryption at rest costs: the tier with a tenant's key over the tier without, in turns on the same disk.

Both sides go through a whole store with the same blocks, as in `raw_io`. AES runs on the thread of the disk, so where
the disk is faster than one core the rates fall, and elsewhere only the processor time grows.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any, Final

from mooncache.bench.tiers.raw_io import DEPTH, tier_rates
from mooncache.reporting.rows import Row, bar_row

_BLOCK: Final = 1 << 20
_DISK_BYTES: Final = 1 << 30
_QUICK_DISK_BYTES: Final = 128 << 20
_SECONDS: Final = 2.0
_QUICK_SECONDS: Final = 0.5
_ROUNDS: Final = 5
# what is compared, its name and its unit, in how many of which it is counted
_SIDES: Final[tuple[tuple[str, str, str, float], ...]] = (
    ("written_bytes_per_s", "1 MiB writes", "MB/s", 1e6),
    ("read_bytes_per_s", "1 MiB random reads", "MB/s", 1e6),
    ("write_cpu_ns_per_kib", "processor time of writes, with the puts", "ms/GB", 1024 / 1e3),
    ("read_cpu_ns_per_kib", "processor time of reads", "ms/GB", 1024 / 1e3),
)


def run(quick: bool, progress: Callable[[str], None]) -> list[Row]:
    """Rates and processor time, without and with a key.

    Raises:
        MooncacheError: the store refused the disk.
    """
    seconds, rounds = (_QUICK_SECONDS, 1) if quick else (_SECONDS, _ROUNDS)
    disk_bytes = _QUICK_DISK_BYTES if quick else _DISK_BYTES
    found: dict[bool, list[dict[str, Any]]] = {False: [], True: []}
    with tempfile.TemporaryDirectory(prefix="mooncache-bench-encryption-") as name:
        for encrypted in (False, True):
            tier_rates(Path(name), _BLOCK, disk_bytes, 0.0, encrypted=encrypted)  # once over both files
        for number in range(rounds):
            for encrypted in (False, True):
                progress(f"{'with' if encrypted else 'without'} a key, round {number + 1} of {rounds}")
                found[encrypted].append(
                    tier_rates(Path(name), _BLOCK, disk_bytes, seconds, encrypted=encrypted)
                )
    return _rows(found[False], found[True])


def _rows(plain: list[dict[str, Any]], encrypted: list[dict[str, Any]]) -> list[Row]:
    rows: list[Row] = []
    for key, name, unit, scale in _SIDES:
        bare, ours = (median(float(one[key]) / scale for one in side) for side in (plain, encrypted))
        rows.append(Row(f"{name}, depth {DEPTH}, not encrypted", bare, unit))
        rows.append(
            bar_row(f"{name}, depth {DEPTH}, encrypted", ours, unit, against="not encrypted", reference=bare)
        )
    return [
        *rows,
        bar_row(
            "bytes of blocks that went to the disk as they are, of the tenant with a key",
            # a batch counts as encrypted a moment before it counts as admitted
            float(sum(max(0, one["admitted_bytes"] - one["encrypted_bytes"]) for one in encrypted)),
            "",
            at_most=0.0,
        ),
        bar_row(
            "blocks that were not what was encrypted",
            float(sum(one["corrupt_blocks"] for one in encrypted)),
            "",
            at_most=0.0,
        ),
    ]
