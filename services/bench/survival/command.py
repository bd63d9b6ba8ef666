"""The command `mooncache bench survival`."""

from __future__ import annotations

from typing import Annotated

from cyclopts import Parameter

from mooncache.bench import cases
from mooncache.bench import survival as folder
from mooncache.reporting.rows import JsonRows, MarkdownRows


def survival(
    *names: Annotated[str, Parameter(help="Cases to run; none: all of them.")],
    json: JsonRows = None,
    markdown: MarkdownRows = None,
    quick: Annotated[bool, Parameter(negative=(), help="Less data: seconds for each case.")] = False,
) -> int:
    """Measure what the loss of a part costs, and how soon all is as it should be again.

    Each case compares figures of one run. A case that cannot run says why, and the others go on.

    For example:

        mooncache bench survival --json survival.json

        mooncache bench survival repair --quick
    """
    title = "the loss of a part, and what follows"
    return cases.run_cases(
        folder, names, title, quick=quick, json=json, markdown=markdown, names_in_rows=True
    )
