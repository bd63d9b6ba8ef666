"""The command `mooncache bench sound`."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable
from functools import partial
from typing import Annotated

from cyclopts import Parameter
from rich.console import Console
from rich.status import Status

from mooncache.bench import sound as cases
from mooncache.errors import InvalidArgument, MooncacheError
from mooncache.reporting.rows import JsonRows, MarkdownRows, Report, Row, describe_machine, describe_versions

SoundCase = Callable[[bool, Callable[[str], None]], list[Row]]
_EXIT_FAILED = 1


def case_names() -> list[str]:
    """Every case, in alphabetical order: the modules of this folder but this one."""
    return sorted(module.name for module in pkgutil.iter_modules(cases.__path__) if module.name != "command")


def load_case(name: str) -> SoundCase:
    """The function that runs a case. Raises InvalidArgument for an unknown name."""
    if name not in case_names():
        raise InvalidArgument(f"There is no case {name!r}. Cases: {', '.join(case_names())}.")
    run: SoundCase = importlib.import_module(f"{cases.__name__}.{name}").run
    return run


def sound(
    *names: Annotated[str, Parameter(help="Cases to run; none: all of them.")],
    json: JsonRows = None,
    markdown: MarkdownRows = None,
    quick: Annotated[bool, Parameter(negative=(), help="Fewer rounds: seconds for each case.")] = False,
) -> int:
    """Measure what one slow, stopped or greedy part costs the others.

    Each case compares figures of one run. A case that cannot run says why, and the others go on.

    For example:

        mooncache bench sound --json sound.json

        mooncache bench sound stopped_node --quick
    """
    console = Console()
    report = Report("one sick part, and what the others notice")
    report.machine = describe_machine()
    report.versions = describe_versions(("mooncache", "vllm", "torch", "grpcio"))
    failed = False
    try:
        chosen = {name: load_case(name) for name in names or case_names()}
    except InvalidArgument as error:
        console.print(str(error), style="red", markup=False)
        return 2
    with console.status("starting") as status:
        for name, run in chosen.items():
            status.update(name)
            try:
                report.add(*run(quick, partial(_tell, status, name)))
            except MooncacheError as error:
                failed = True
                report.notes.append(f"{name} could not be measured: {error}")
    report.deliver(console, json, markdown)
    return _EXIT_FAILED if failed else 0


def _tell(status: Status, name: str, text: str) -> None:
    """One line of progress, with the case that it belongs to."""
    status.update(f"{name}: {text}")
