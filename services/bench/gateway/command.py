"""The command `mooncache bench gateway`."""

from __future__ import annotations

from typing import Annotated

from cyclopts import Parameter
from rich.console import Console

from mooncache.bench.delivery import deliver
from mooncache.bench.gateway import CASES, GatewayBenchOptions, run
from mooncache.reporting.rows import JsonRows, MarkdownRows


def gateway(
    *,
    json: JsonRows = None,
    markdown: MarkdownRows = None,
    only: Annotated[
        tuple[str, ...], Parameter(help=f"Run only these cases: {', '.join(CASES)}.", negative=())
    ] = (),
    quick: Annotated[
        bool, Parameter(negative=(), help="Less data: takes half a minute; the figures are not comparable.")
    ] = False,
) -> int:
    """Measure what a gateway adds: time to the first token, tokenising, requests and events per second.

    Real pool, conductor and gateway on loopback before engines that compute nothing, beside the same requests sent to
    an engine directly. Everything shares this machine's processors. Takes about two minutes.

    For example:

        mooncache bench gateway --json gateway.json

        mooncache bench gateway --only relay --quick
    """
    console = Console()
    unknown = [name for name in only if name not in CASES]
    if unknown:
        console.print(f"There is no case {unknown[0]!r}; the cases are: {', '.join(CASES)}.", style="red")
        return 2
    options = GatewayBenchOptions()
    if quick:
        options = options.quick()
    return deliver(lambda progress: run(options, progress, only or CASES), json, markdown)
