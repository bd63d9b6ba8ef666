"""The command `mooncache reproduce`: published figures measured again, ours beside the paper's."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from mooncache.errors import InvalidArgument, ScenarioUnknown, TraceInvalid, TraceTooLarge
from mooncache.reporting.output import (
    EXIT_MISS,
    EXIT_OK,
    EXIT_USAGE,
    check_writable,
    console,
    error_console,
    print_table,
    report_error,
)
from mooncache.reporting.workload import need_packages, progress

if TYPE_CHECKING:
    from mooncache.reproduce.lab import Lab, LabProgress
    from mooncache.reproduce.scenario import Scenario


def reproduce(
    *scenarios: Annotated[str, Parameter(help="Names as `--list` shows them; none: all.")],
    trace: Annotated[
        Path | None, Parameter(help="The conversation trace, JSONL. Without it: generated.")
    ] = None,
    trace_toolagent: Annotated[
        Path | None, Parameter(help="The tool and agent trace. Without: generated.")
    ] = None,
    trace_synthetic: Annotated[
        Path | None, Parameter(help="The synthetic trace. Without: generated.")
    ] = None,
    json: Annotated[bool, Parameter(negative=(), help="Rows as one JSON document, nothing else.")] = False,
    markdown: Annotated[Path | None, Parameter(help="Also write the tables to this file.")] = None,
    quick: Annotated[bool, Parameter(negative=(), help="Use only the start of each trace.")] = False,
    jobs: Annotated[int, Parameter(help="Processes for independent simulations; 0: one for each core.")] = 0,
    list_: Annotated[
        bool, Parameter(name="--list", negative=(), help="List the scenarios and exit.")
    ] = False,
) -> int:
    """Measure the published figures and tables of Mooncake again, with this project's policies and simulator.

    Each scenario prints ours | paper | ratio, and a bar where one was promised. The public traces are not part of
    this project: give their paths, or take the generated stand-ins (rows made on these carry a star). Exit code 1
    when a bar was missed.

    For example:

        mooncache reproduce table1 break-even --trace conversation_trace.jsonl
    """
    need_packages("numpy")
    from mooncache.reproduce import registry
    from mooncache.reproduce.lab import Lab
    from mooncache.reproduce.setting import QUICK_REQUESTS
    from mooncache.reproduce.workloads import Sources

    try:
        chosen = registry.choose(scenarios)
    except ScenarioUnknown as error:
        report_error(error, as_json=json)
        return EXIT_USAGE  # 1 would be a missed bar
    if list_:
        columns = ("name", "what", "from", "takes")
        print_table("scenarios", columns, [(one.name, one.title, one.source, one.work) for one in chosen])
        return EXIT_OK
    check_writable(markdown, "--markdown")
    _readable({"--trace": trace, "--trace-toolagent": trace_toolagent, "--trace-synthetic": trace_synthetic})
    if jobs < 0:
        raise InvalidArgument(f"--jobs: {jobs} processes; 0 for one on each core, or more.")
    sources = Sources(trace, trace_toolagent, trace_synthetic, QUICK_REQUESTS if quick else 0)
    for name in ("conversation", "toolagent", "synthetic"):
        if sources.path(name) is None and not json:
            error_console.print(f"[dim]no {name} trace: a generated stand-in is used (rows with a star)[/]")
    try:
        with _progress(quiet=json) as tell, Lab(sources, jobs or os.cpu_count() or 1, tell) as lab:
            return _measure(lab, chosen, tell, markdown, as_json=json)
    except (TraceInvalid, TraceTooLarge) as error:
        report_error(error, as_json=json)
        return EXIT_USAGE


def _measure(
    lab: Lab, chosen: list[Scenario], tell: LabProgress, markdown: Path | None, *, as_json: bool
) -> int:
    """Run the scenarios, show each as it ends, and return the exit code."""
    from mooncache.reproduce import registry

    sheets = []
    for number, scenario in enumerate(chosen, start=1):
        tell(f"{scenario.name} ({number} of {len(chosen)})", 0, 0)
        sheet = registry.run_one(lab, scenario)
        sheets.append(sheet)
        if not as_json:
            sheet.print(console)
    report = registry.report(lab, sheets)
    if markdown is not None:
        markdown.write_text(registry.page(report, sheets), encoding="utf-8")
    if as_json:
        sys.stdout.write(report.to_json() + "\n")
    missed = [row.name for row in report.rows if row.met is False]
    if missed and not as_json:
        error_console.print(f"[red]{len(missed)} bars missed[/]: {'; '.join(missed)}", soft_wrap=True)
    return EXIT_MISS if missed else EXIT_OK


def _readable(files: dict[str, Path | None]) -> None:
    """Raises: InvalidArgument for an option that names no file."""
    for option, path in files.items():
        if path is not None and not path.is_file():
            raise InvalidArgument(f"{option}: there is no file {path}.")


@contextmanager
def _progress(*, quiet: bool) -> Iterator[LabProgress]:
    """A bar that says which scenario is under way, and what it simulates."""
    scenario = "starting"
    with progress("simulations", quiet=quiet) as bar:

        def tell(what: str, done: int, total: int) -> None:
            nonlocal scenario
            if total == 0:
                scenario = what
            bar(f"{scenario}: {what}" if total else scenario, done, total)

        yield tell
