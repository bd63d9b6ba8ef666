"""The command `mooncache bench conductor`."""

from __future__ import annotations

import dataclasses
from typing import Annotated

from cyclopts import Parameter
from rich.console import Console

from mooncache.bench.conductor.cases import ConductorBenchOptions, run
from mooncache.reporting.rows import JsonRows, MarkdownRows


def conductor(
    *,
    json: JsonRows = None,
    markdown: MarkdownRows = None,
    prompt_tokens: Annotated[int, Parameter(help="Length of the prompts.")] = 128 * 1024,
    decisions: Annotated[int, Parameter(help="How many decisions are timed.")] = 2000,
    prefill_instances: Annotated[int, Parameter(help="Instances that compute prompts.")] = 48,
    decode_instances: Annotated[int, Parameter(help="Instances that generate.")] = 16,
    index_blocks: Annotated[int, Parameter(help="Blocks in all caches together.")] = 1_000_000,
    quick: Annotated[bool, Parameter(negative=(), help="Fewer decisions: seconds.")] = False,
) -> int:
    """Measure how long a decision of the conductor takes, alone and as a whole Schedule op.

    In this process, without network, over 64 instances and an index of a million blocks unless options say otherwise,
    and what it costs to keep the index and to look a prompt up. Takes about a minute.

    For example:

        mooncache bench conductor --json conductor.json

        mooncache bench conductor --prefill-instances 600 --decode-instances 400
    """
    console = Console()
    options = ConductorBenchOptions(
        prompt_tokens=prompt_tokens,
        decisions=decisions,
        prefill_instances=prefill_instances,
        decode_instances=decode_instances,
        index_blocks=index_blocks,
    )
    if prompt_tokens < max(options.block_sizes) or decisions < 10:
        console.print("--prompt-tokens must be at least 64, --decisions at least 10.", style="red")
        return 2
    if min(prefill_instances, decode_instances) < 1 or index_blocks < 1:
        console.print("At least one instance of each kind and one block are needed.", style="red")
        return 2
    if quick:
        options = dataclasses.replace(options, decisions=min(decisions, 200))
    with console.status("starting") as status:
        report = run(options, status.update)
    report.deliver(console, json, markdown)
    return 0
