"""The command `mooncache bench sound`."""

from __future__ import annotations

from typing import Annotated

from cyclopts import Parameter

from mooncache.bench import cases
from mooncache.bench import sound as folder
from mooncache.reporting.rows import JsonRows, MarkdownRows


def case_names() -> list[str]:
    """Every case, in alphabetical order."""
    return cases.case_names(folder)


def load_case(name: str) -> cases.RunCase:
    """The function that runs a case. Raises InvalidArgument for an unknown name."""
    return cases.load_case(folder, name)


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
    title = "one sick part, and what the others notice"
    return cases.run_cases(folder, names, title, quick=quick, json=json, markdown=markdown)
