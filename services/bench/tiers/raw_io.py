"""Bytes of the disk through the tier, with checksums, over fio on the same disk: fio, the tier, fio again.

The tier's side goes through a whole store: blocks are put into memory, leave it for the disk because newer ones come,
and come up again, each compared with its checksum. fio moves bytes between the disk and its own buffers, with the best
of its engines; what it reads and writes lies in a file that was written before, like the tier's.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from statistics import fmean
from typing import Any, Final

from mooncache.bench.fio import FioRates, Work, fio
from mooncache.client.native_call import call_native
from mooncache.reporting.rows import Row, bar_row

DEPTH: Final = 32
_LARGE, _SMALL = 1 << 20, 64 << 10
_DISK_BYTES: Final = 2 << 30
_QUICK_DISK_BYTES: Final = 128 << 20
_SECONDS: Final = 8.0
_QUICK_SECONDS: Final = 0.5
# fio's work, its blocks, and the share of fio that the tier has to reach
_WORKS: Final[tuple[tuple[str, Work, int, float], ...]] = (
    ("1 MiB writes", "write", _LARGE, 0.9),
    ("1 MiB reads", "read", _LARGE, 0.9),
    ("1 MiB random reads", "randread", _LARGE, 0.9),
    ("64 KiB random reads", "randread", _SMALL, 0.85),
)


def run(quick: bool, progress: Callable[[str], None]) -> list[Row]:
    """fio's and the tier's rates of each kind of work, and what the tier costs the processor.

    Raises:
        MooncacheError: the store refused the disk, or a block did not match its checksum.
    """
    seconds = _QUICK_SECONDS if quick else _SECONDS
    disk_bytes = _QUICK_DISK_BYTES if quick else _DISK_BYTES
    with tempfile.TemporaryDirectory(prefix="mooncache-bench-tiers-") as name:
        first = _fio_round(Path(name), disk_bytes, seconds, progress)
        ours: dict[int, dict[str, Any]] = {}
        for block_bytes in (_LARGE, _SMALL):
            progress(f"the tier, blocks of {block_bytes >> 10} KiB")
            ours[block_bytes] = tier_rates(Path(name), block_bytes, disk_bytes, seconds)
        again = _fio_round(Path(name), disk_bytes, seconds, progress)
    return _rows(first, again, ours)


def tier_rates(folder: Path, block_bytes: int, disk_bytes: int, seconds: float) -> dict[str, Any]:
    """What the tier moves in this folder. Raises MooncacheError when the store refuses."""
    from mooncache import _native

    below = folder / f"blocks-{block_bytes}"
    below.mkdir()
    found = call_native(
        _native.disk_rates_benchmark,
        path=str(below),
        disk_bytes=disk_bytes,
        memory_bytes=disk_bytes // 4,
        block_bytes=block_bytes,
        depth=DEPTH,
        write_ms=round(seconds * 1e3),
        read_ms=round(seconds * 1e3),
    )
    (below / "mooncache.ssd").unlink()
    return found


def _fio_round(
    folder: Path, disk_bytes: int, seconds: float, progress: Callable[[str], None]
) -> dict[str, FioRates | str]:
    found: dict[str, FioRates | str] = {}
    for name, work, block_bytes, _ in _WORKS:
        progress(f"fio, {name}")
        found[name] = fio(
            folder / "fio",
            work,
            block_bytes=block_bytes,
            file_bytes=disk_bytes,
            depth=DEPTH,
            seconds=seconds / 2,
        )
    return found


def _rows(
    first: dict[str, FioRates | str], again: dict[str, FioRates | str], ours: dict[int, dict[str, Any]]
) -> list[Row]:
    rows: list[Row] = []
    for name, work, block_bytes, bar in _WORKS:
        found = [rates for rates in (first[name], again[name]) if not isinstance(rates, str)]
        small = block_bytes == _SMALL
        unit, scale = ("1/s", 1.0) if small else ("MB/s", 1e6)
        reference: float | None = None
        if found:
            rates = [one.operations_per_s if small else one.bytes_per_s for one in found]
            reference = fmean(rates) / scale
            spread = max(rates) / min(rates)
            title = f"{name}, depth {DEPTH}, fio ({found[0].engine}; its two rounds differ {spread:.2f}x)"
            rows.append(Row(title, reference, unit))
        else:
            rows.append(Row(f"{name}: nothing to compare with, {first[name]}", 0.0, unit))
        key = "written_bytes_per_s" if work == "write" else "reads_per_s" if small else "read_bytes_per_s"
        rows.append(
            bar_row(
                f"{name}, depth {DEPTH}, the tier, checksums on",
                float(ours[block_bytes][key]) / scale,
                unit,
                against="fio",
                reference=reference,
                at_least=bar,
            )
        )
    large, small_blocks = ours[_LARGE], ours[_SMALL]
    damaged = float(large["corrupt_blocks"] + small_blocks["corrupt_blocks"])
    return [
        *rows,
        Row("processor time of the tier's writes, with the puts", _ms_per_gb(large, "write"), "ms/GB"),
        Row("processor time of the tier's reads, 1 MiB", _ms_per_gb(large, "read"), "ms/GB"),
        Row("processor time of the tier's reads, 64 KiB", _ms_per_gb(small_blocks, "read"), "ms/GB"),
        bar_row("blocks that did not match their checksum", damaged, "", at_most=0.0),
    ]


def _ms_per_gb(rates: dict[str, Any], side: str) -> float:
    return float(rates[f"{side}_cpu_ns_per_kib"]) * 1e9 / 1024 / 1e6
