"""From a measurement to what a command prints: the same for all benchmarks."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from rich.console import Console

from mooncache.bench.worker import WorkerError
from mooncache.errors import MooncacheError
from mooncache.reporting.rows import Report

EXIT_FAILED = 1


def deliver(
    measure: Callable[[Callable[[str], None]], Report], json: Path | None, markdown: Path | None
) -> int:
    """Measure under a line of progress, then print and write the report. Returns the command's exit status."""
    console = Console()
    try:
        with console.status("starting") as status:
            report = measure(status.update)
    except (WorkerError, MooncacheError) as error:
        console.print(f"The benchmark could not finish: {error}", style="red", markup=False)
        return EXIT_FAILED
    report.deliver(console, json, markdown)
    return 0
