"""Bytes of the disk through the tier, with checksums, over fio on the same disk: fio, the tier, fio again, and so on.

The tier's side goes through a whole store: blocks are put into memory, leave it for the disk because newer ones come,
and come up again, each compared with its checksum. fio moves bytes between the disk and its own buffers, with the
better of two engines; what it reads and writes lies in a file that was written before, like the tier's.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median
from typing import Any, Final

from mooncache.bench.fio import ENGINES, DiskWork, FioRates, fio
from mooncache.client.native_call import call_native
from mooncache.reporting.rows import Row, bar_row

DEPTH: Final = 32
_LARGE, _SMALL = 1 << 20, 64 << 10
_DISK_BYTES: Final = 2 << 30
_QUICK_DISK_BYTES: Final = 128 << 20
_SECONDS: Final = 2.0
_ROUNDS: Final = 5
_QUICK_SECONDS: Final = 0.5
# fio's work, its blocks, and the share of fio that the tier has to reach
_WORKS: Final[tuple[tuple[str, DiskWork, int, float], ...]] = (
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
    seconds, rounds = (_QUICK_SECONDS, 1) if quick else (_SECONDS, _ROUNDS)
    disk_bytes = _QUICK_DISK_BYTES if quick else _DISK_BYTES
    with tempfile.TemporaryDirectory(prefix="mooncache-bench-tiers-") as name:
        bare = _Fio(Path(name) / "fio", disk_bytes, seconds)
        engine = bare.best_engine(progress)
        for block_bytes in (_LARGE, _SMALL):
            progress("the tier's files")
            tier_rates(
                Path(name), block_bytes, disk_bytes, 0.0
            )  # once over them, before anything is compared
        yardsticks = [bare.round(engine, progress)]
        ours: list[dict[int, dict[str, Any]]] = []
        for number in range(rounds):
            ours.append({})
            for block_bytes in (_LARGE, _SMALL):
                progress(f"the tier, blocks of {block_bytes >> 10} KiB, round {number + 1} of {rounds}")
                ours[-1][block_bytes] = tier_rates(Path(name), block_bytes, disk_bytes, seconds)
            yardsticks.append(bare.round(engine, progress))
    return _rows(yardsticks, ours)


def tier_rates(
    folder: Path, block_bytes: int, disk_bytes: int, seconds: float, *, encrypted: bool = False
) -> dict[str, Any]:
    """What the tier moves in this folder. Its file stays for the next round, as fio's does. Raises MooncacheError."""
    from mooncache import _native

    below = folder / f"blocks-{block_bytes}{'-encrypted' if encrypted else ''}"
    below.mkdir(exist_ok=True)
    return call_native(
        _native.disk_rates_benchmark,
        path=str(below),
        disk_bytes=disk_bytes,
        memory_bytes=disk_bytes // 4,
        block_bytes=block_bytes,
        depth=DEPTH,
        write_ms=round(seconds * 1e3),
        read_ms=round(seconds * 1e3),
        encrypted=encrypted,
    )


@dataclass(frozen=True, slots=True)
class _Fio:
    file: Path
    file_bytes: int
    seconds: float

    def best_engine(self, progress: Callable[[str], None]) -> str:
        """The one that reads most small blocks, the first one when none does; this also writes the file."""
        rates = {}
        for engine in ENGINES:
            progress(f"fio, {engine}")
            found = self._one(engine, "randread", _SMALL)
            rates[engine] = found.operations_per_s if isinstance(found, FioRates) else 0.0
        return max(rates, key=lambda engine: rates[engine])

    def round(self, engine: str, progress: Callable[[str], None]) -> dict[str, FioRates | str]:
        """Each kind of work once."""
        found = {}
        for name, work, block_bytes, _ in _WORKS:
            progress(f"fio, {name}")
            found[name] = self._one(engine, work, block_bytes)
        return found

    def _one(self, engine: str, work: DiskWork, block_bytes: int) -> FioRates | str:
        return fio(
            self.file,
            engine,
            work,
            block_bytes=block_bytes,
            file_bytes=self.file_bytes,
            depth=DEPTH,
            seconds=self.seconds,
        )


def _rows(yardsticks: list[dict[str, FioRates | str]], ours: list[dict[int, dict[str, Any]]]) -> list[Row]:
    rows: list[Row] = []
    for name, work, block_bytes, bar in _WORKS:
        small = block_bytes == _SMALL
        unit, scale = ("1/s", 1.0) if small else ("MB/s", 1e6)
        key = "written_bytes_per_s" if work == "write" else "reads_per_s" if small else "read_bytes_per_s"
        tier = [float(found[block_bytes][key]) / scale for found in ours]
        bare: list[float] = []
        why, engine = "", ""
        for rates in (found[name] for found in yardsticks):
            if isinstance(rates, str):
                why = rates
            else:
                engine = rates.engine
                bare.append((rates.operations_per_s if small else rates.bytes_per_s) / scale)
        reference: float | None = None
        if why:
            rows.append(Row(f"{name}: nothing to compare with, {why}", 0.0, unit))
        else:
            reference = median(tier) / median(over_neighbours(tier, bare))
            low, high = min(bare), max(bare)
            spread = f"{low:,.0f} to {high:,.0f} in {len(bare)} rounds"
            rows.append(Row(f"{name}, depth {DEPTH}, fio ({engine}; {spread})", reference, unit))
        rows.append(
            bar_row(
                f"{name}, depth {DEPTH}, the tier, checksums on",
                median(tier),
                unit,
                against="fio",
                reference=reference,
                at_least=bar,
            )
        )
    every = [rates for found in ours for rates in found.values()]
    return [
        *rows,
        Row("processor time of the tier's writes, with the puts", _ms_per_gb(ours, _LARGE, "write"), "ms/GB"),
        Row("processor time of the tier's reads, 1 MiB", _ms_per_gb(ours, _LARGE, "read"), "ms/GB"),
        Row("processor time of the tier's reads, 64 KiB", _ms_per_gb(ours, _SMALL, "read"), "ms/GB"),
        bar_row(
            "blocks that did not match their checksum",
            float(sum(rates["corrupt_blocks"] for rates in every)),
            "",
            at_most=0.0,
        ),
    ]


def over_neighbours(tier: list[float], bare: list[float]) -> list[float]:
    """Each figure of the tier over the mean of fio's before and after it: a disk of a shared host is not the same a
    minute later."""
    return [ours / fmean(bare[at : at + 2]) for at, ours in enumerate(tier)]


def _ms_per_gb(ours: list[dict[int, dict[str, Any]]], block_bytes: int, side: str) -> float:
    return median(float(found[block_bytes][f"{side}_cpu_ns_per_kib"]) for found in ours) * 1e9 / 1024 / 1e6
