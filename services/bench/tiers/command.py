"""The command `mooncache bench tiers`."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from mooncache.bench import cases, disk_calibration
from mooncache.bench import tiers as folder_of_cases
from mooncache.errors import InvalidArgument
from mooncache.reporting.rows import JsonRows, MarkdownRows


def tiers(
    *names: Annotated[str, Parameter(help="Cases to run; none: all of them.")],
    case: Annotated[tuple[str, ...], Parameter(negative=(), help="The same, as an option.")] = (),
    folder: Annotated[
        Path | None, Parameter(help="A folder on the disk to measure; else the one for temporary files.")
    ] = None,
    json: JsonRows = None,
    markdown: MarkdownRows = None,
    calibrate: Annotated[
        Path | None,
        Parameter(help="Measure the disk alone and write its rates to this file, for `simulate` and `plan`."),
    ] = None,
    quick: Annotated[bool, Parameter(negative=(), help="Fewer rounds: seconds for each case.")] = False,
) -> int:
    """Measure the SSD tier: bytes against fio on the same disk, memory beside a busy and a stalled disk, writes, a
    start, and time to the first token with a working set of twice the memory.

    Each case compares figures of one run. A case that cannot run says why, and the others go on. Needs 4 GiB of the
    disk for a while.

    For example:

        mooncache bench tiers --folder /mnt/nvme0 --json tiers.json

        mooncache bench tiers raw_io --quick

        mooncache bench tiers --folder /mnt/nvme0 --calibrate disk.toml && mooncache plan --disk disk.toml
    """
    if calibrate is not None and (names or case):
        raise InvalidArgument("--calibrate measures the disk alone: leave out the names of cases.")
    before = tempfile.tempdir
    tempfile.tempdir = str(folder.expanduser()) if folder is not None else None
    try:
        if calibrate is not None:
            return disk_calibration.run(calibrate, quick=quick, json=json, markdown=markdown)
        return cases.run_cases(
            folder_of_cases,
            (*names, *case),
            "the SSD tier",
            quick=quick,
            json=json,
            markdown=markdown,
        )
    finally:
        tempfile.tempdir = before
