"""`mooncache bench tiers --calibrate FILE`: rates of the SSD tier on one disk, for `mooncache simulate` and `plan`."""

from __future__ import annotations

import os
import platform
import tempfile
from datetime import UTC, datetime
from pathlib import Path
from statistics import median
from typing import Any, Final

from rich.console import Console

from mooncache.bench.cases import EXIT_FAILED
from mooncache.bench.tiers.raw_io import DEPTH, tier_rates
from mooncache.reporting.output import EXIT_OK, check_writable
from mooncache.reporting.rows import Report, Row, bar_row, describe_machine, describe_versions
from mooncache.simulate.disk_profile import LARGE_BYTES, SMALL_BYTES, DiskProfile

_ROUNDS: Final = 5
_SECONDS: Final = 2.0
_DISK_BYTES: Final = 2 << 30
_QUICK_SECONDS: Final = 0.5
_QUICK_DISK_BYTES: Final = 128 << 20


def run(file: Path, *, quick: bool, json: Path | None, markdown: Path | None) -> int:
    """Measure, write the profile, print the rows. Returns the command's exit code: a corrupt block fails it.

    Raises:
        InvalidArgument: the file cannot be written.
        MooncacheError: the store refused the disk.
    """
    check_writable(file, "--calibrate")
    console = Console()
    rounds, seconds = (1, _QUICK_SECONDS) if quick else (_ROUNDS, _SECONDS)
    disk_bytes = _QUICK_DISK_BYTES if quick else _DISK_BYTES
    found: dict[int, list[dict[str, Any]]] = {LARGE_BYTES: [], SMALL_BYTES: []}
    with (
        tempfile.TemporaryDirectory(prefix="mooncache-calibrate-") as name,
        console.status("starting") as status,
    ):
        folder = str(Path(name).parent)
        for number in range(-1, rounds):
            for block_bytes, rates in found.items():
                # The first round makes the files: a fresh file costs the file system its allocation.
                what = f"round {number + 1} of {rounds}" if number >= 0 else "making the files"
                status.update(f"blocks of {block_bytes >> 10} KiB, {what}")
                one = tier_rates(Path(name), block_bytes, disk_bytes, seconds if number >= 0 else 0.0)
                if number >= 0:
                    rates.append(one)
    report = _report(found)
    report.deliver(console, json, markdown)
    if not all(row.met is not False for row in report.rows):
        console.print(
            f"{file} was not written: the disk gave back other bytes than it was given.", style="red"
        )
        return EXIT_FAILED
    file.write_text(_profile(found).to_toml(*_remarks(folder, rounds)), encoding="utf-8")
    console.print(f"wrote {file}", markup=False, soft_wrap=True)
    return EXIT_OK


def _profile(found: dict[int, list[dict[str, Any]]]) -> DiskProfile:
    return DiskProfile(
        read_gb_per_s=_rate(found[LARGE_BYTES], "read_bytes_per_s") / 1e9,
        small_read_gb_per_s=_rate(found[SMALL_BYTES], "read_bytes_per_s") / 1e9,
        write_gb_per_s=_rate(found[LARGE_BYTES], "written_bytes_per_s") / 1e9,
    ).check("the measurement")


def _rate(rounds: list[dict[str, Any]], name: str) -> float:
    return median(float(rates[name]) for rates in rounds)


def _remarks(folder: str, rounds: int) -> tuple[str, ...]:
    when = datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC")
    how = f"{DEPTH} blocks under way, checksums on, {os.cpu_count()} cores; medians of {rounds} rounds."
    return (
        f"Written by `mooncache bench tiers --calibrate` on {platform.node()}, {when}.",
        f"The SSD tier in {folder}, {how}",
        "For `mooncache simulate --disk FILE` and `mooncache plan --disk FILE`. With more disks of this kind in a",
        "machine, raise `disks`.",
    )


def _report(found: dict[int, list[dict[str, Any]]]) -> Report:
    report = Report("a disk under the SSD tier")
    report.machine = describe_machine()
    report.versions = describe_versions(("mooncache",))
    corrupt = sum(float(rates["corrupt_blocks"]) for rounds in found.values() for rates in rounds)
    report.add(
        Row("1 MiB reads", _rate(found[LARGE_BYTES], "read_bytes_per_s") / 1e6, "MB/s"),
        Row("64 KiB reads", _rate(found[SMALL_BYTES], "read_bytes_per_s") / 1e6, "MB/s"),
        Row("1 MiB writes", _rate(found[LARGE_BYTES], "written_bytes_per_s") / 1e6, "MB/s"),
        bar_row("blocks that did not match their checksum", corrupt, "", at_most=0.0),
    )
    return report
