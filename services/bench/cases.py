"""Benchmarks that consist of cases, one file each: a folder whose modules have `run(quick, progress)`, beside its
`command.py`. A case that cannot run says why, and the others go on."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import ModuleType

from rich.console import Console
from rich.status import Status

from mooncache.errors import InvalidArgument, MooncacheError
from mooncache.reporting.rows import Report, Row, describe_machine, describe_versions

RunCase = Callable[[bool, Callable[[str], None]], list[Row]]
EXIT_FAILED = 1
_EXIT_WRONG_ARGUMENTS = 2


def case_names(folder: ModuleType) -> list[str]:
    """Every case, in alphabetical order: the modules of the folder but its command."""
    return sorted(module.name for module in pkgutil.iter_modules(folder.__path__) if module.name != "command")


def load_case(folder: ModuleType, name: str) -> RunCase:
    """The function that runs a case. Raises InvalidArgument for an unknown name."""
    if name not in case_names(folder):
        raise InvalidArgument(f"There is no case {name!r}. Cases: {', '.join(case_names(folder))}.")
    run: RunCase = importlib.import_module(f"{folder.__name__}.{name}").run
    return run


def run_cases(
    folder: ModuleType,
    names: Sequence[str],
    title: str,
    *,
    quick: bool,
    json: Path | None,
    markdown: Path | None,
    names_in_rows: bool = False,
) -> int:
    """Run the cases of these names, or all; deliver the rows. Returns the command's exit code.

    names_in_rows: begin each row with the name of its case, where rows do not say it themselves.
    """
    console = Console()
    report = Report(title)
    report.machine = describe_machine()
    report.versions = describe_versions(("mooncache", "vllm", "torch", "grpcio"))
    failed = False
    try:
        chosen = {name: load_case(folder, name) for name in names or case_names(folder)}
    except InvalidArgument as error:
        console.print(str(error), style="red", markup=False)
        return _EXIT_WRONG_ARGUMENTS
    with console.status("starting") as status:
        for name, run in chosen.items():
            status.update(name)
            try:
                rows = run(quick, partial(_tell, status, name))
                report.add(
                    *(replace(row, name=f"{name}: {row.name}") if names_in_rows else row for row in rows)
                )
            except MooncacheError as error:
                failed = True
                report.notes.append(f"{name} could not be measured: {error}")
    report.deliver(console, json, markdown)
    return EXIT_FAILED if failed else 0


def _tell(status: Status, name: str, text: str) -> None:
    """One line of progress, with the case that it belongs to."""
    status.update(f"{name}: {text}")
