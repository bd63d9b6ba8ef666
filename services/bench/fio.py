"""fio on the disk of a folder: what the disk gives to a program that does nothing but read and write."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal

DiskWork = Literal["read", "write", "randread"]
ENGINES: Final = ("io_uring", "libaio")
_MARGIN_S: Final = 60.0
_BESIDE_S: Final = 600.0  # for something that ends before


@dataclass(frozen=True, slots=True)
class FioRates:
    """What one run moved."""

    bytes_per_s: float
    operations_per_s: float
    engine: str


def fio(
    file: Path, engine: str, work: DiskWork, *, block_bytes: int, file_bytes: int, depth: int, seconds: float
) -> FioRates | str:
    """One run without the page cache; the reason when there is none. The file stays."""
    if shutil.which("fio") is None:
        return "fio is not installed (Debian package fio)"
    command = _command(file, engine, work, block_bytes, file_bytes, depth, seconds)
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=seconds + _MARGIN_S, check=True
        )
        return parse_fio(done.stdout, engine)
    except (subprocess.SubprocessError, OSError, ValueError, KeyError, IndexError) as error:
        return f"fio gave no figure with {engine}: {error}"


@contextmanager
def fio_beside(
    file: Path, *, block_bytes: int, file_bytes: int, depth: int, bytes_per_s: float
) -> Iterator[None]:
    """fio reads at random while this is open, at most so fast. The file was made by `fio()`, which has run."""
    command = _command(file, ENGINES[0], "randread", block_bytes, file_bytes, depth, _BESIDE_S)
    # A thread and no child: who ends the process ends its work.
    process = subprocess.Popen(
        [*command, "--thread", f"--rate={max(1, round(bytes_per_s))}"],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        yield
    finally:
        process.kill()
        process.wait()


def _command(
    file: Path, engine: str, work: DiskWork, block_bytes: int, file_bytes: int, depth: int, seconds: float
) -> list[str]:
    return [
        "fio",
        "--name=disk",
        f"--filename={file}",
        f"--ioengine={engine}",
        f"--rw={work}",
        f"--bs={block_bytes}",
        f"--size={file_bytes}",
        f"--iodepth={depth}",
        f"--runtime={seconds:g}",
        "--time_based",
        "--direct=1",
        "--output-format=json",
    ]


def parse_fio(text: str, engine: str) -> FioRates:
    """The one job of `fio --output-format=json`, of which lines that are no JSON may come first.

    Raises:
        ValueError: this is no such output.
        KeyError, IndexError: it has no job.
    """
    job: dict[str, Any] = json.loads(text[text.index("{") :])["jobs"][0]
    sides = [job[side] for side in ("read", "write")]
    return FioRates(
        sum(float(side["bw_bytes"]) for side in sides), sum(float(side["iops"]) for side in sides), engine
    )
