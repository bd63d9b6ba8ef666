"""The command `mooncache bench handover`."""

from __future__ import annotations

from typing import Annotated

from cyclopts import Parameter

from mooncache.bench import cases
from mooncache.bench import handover as folder
from mooncache.reporting.rows import JsonRows, MarkdownRows


def handover(
    *names: Annotated[str, Parameter(help="Cases to run; none: all of them.")],
    json: JsonRows = None,
    markdown: MarkdownRows = None,
    quick: Annotated[bool, Parameter(negative=(), help="Fewer rounds: seconds for each case.")] = False,
) -> int:
    """Measure how KV gets from the engine that computes it to the engine that needs it.

    Each case compares figures of one run. A case that cannot run says why, and the others go on.

    For example:

        mooncache bench handover --json handover.json

        mooncache bench handover layerwise --quick
    """
    title = "the hand-over: from the engine that computes KV to the engine that needs it"
    return cases.run_cases(folder, names, title, quick=quick, json=json, markdown=markdown)
