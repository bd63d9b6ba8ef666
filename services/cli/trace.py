"""`mooncache trace`: look at a trace before anything is built on it, describe it, or generate one."""

from __future__ import annotations

import math
import random
import time
from dataclasses import asdict, replace
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from mooncache.errors import InvalidArgument
from mooncache.reporting.output import EXIT_OK, console, human_age, print_json
from mooncache.reporting.workload import PUBLIC_FORMAT, TraceFormat, need_packages

if TYPE_CHECKING:
    from collections.abc import Callable

    from mooncache.traces import GenerateOptions
    from mooncache.traces.stats import TraceStats

AsJson = Annotated[bool, Parameter(name="--json", help="Print one JSON document.")]


class TraceKind(StrEnum):
    """Kinds of requests that can be generated."""

    CONVERSATION = "conversation"
    TOOL_AGENT = "tool-agent"
    SINGLE_TURN = "single-turn"


def check(
    file: Annotated[Path, Parameter(help="A trace in the JSONL format, plain or gzipped.")],
    *,
    form: TraceFormat = PUBLIC_FORMAT,
    as_json: AsJson = False,
) -> int:
    """Say whether a file is a usable trace; if not, which line and field is wrong.

    For example: `mooncache trace check conversation_trace.jsonl`
    """
    began_s = time.perf_counter()
    trace = form.read(file, "FILE")
    seconds = time.perf_counter() - began_s
    if as_json:
        print_json(
            {
                "file": str(file),
                "requests": len(trace),
                "blocks": len(trace.hash_ids),
                "block_tokens": trace.block_tokens,
                "span_s": trace.span_s,
                "seconds": seconds,
            }
        )
    else:
        console.print(
            f"[green]✓[/] {len(trace):,} requests in {human_age(trace.span_s)}, {len(trace.hash_ids):,} block ids "
            f"of {trace.block_tokens} tokens [dim]({seconds:.1f} s)[/]"
        )
    return EXIT_OK


def stats(
    file: Annotated[Path, Parameter(help="A trace in the JSONL format, plain or gzipped.")],
    *,
    form: TraceFormat = PUBLIC_FORMAT,
    as_json: AsJson = False,
) -> int:
    """Describe a trace: rate, lengths, shared blocks, and the hit ratio that an unlimited cache would reach.

    For example: `mooncache trace stats conversation_trace.jsonl --json`
    """
    need_packages("numpy")
    from mooncache.traces.stats import stats as figures_of

    _show(figures_of(form.read(file, "FILE")), str(file), as_json=as_json)
    return EXIT_OK


def generate(
    file: Annotated[Path, Parameter(help="Where to write the trace; .gz compresses it.")],
    *,
    kind: Annotated[
        TraceKind,
        Parameter(help="Chat, tools with long system prompts, or independent requests."),
    ] = TraceKind.CONVERSATION,
    requests: Annotated[int, Parameter(help="Number of requests; 0 generates one hour of the kind.")] = 0,
    seconds: Annotated[
        float, Parameter(help="Length of the trace in seconds; 0: as long as the requests take.")
    ] = 0,
    rate: Annotated[float, Parameter(help="Requests per second; 0 means the kind's own.")] = 0,
    returning: Annotated[
        float, Parameter(help="How often conversations continue: 1 is as in the public trace, 0 is never.")
    ] = 1.0,
    input_mean: Annotated[
        float, Parameter(help="Mean of first prompts in tokens; 0 means the kind's own.")
    ] = 0,
    output_mean: Annotated[float, Parameter(help="Mean of answers in tokens; 0 means the kind's own.")] = 0,
    tick: Annotated[
        float, Parameter(help="Unit of the timestamps, in seconds; -1 takes the kind's own.")
    ] = -1.0,
    block_tokens: Annotated[int, Parameter(help="Tokens of a block.")] = 512,
    tenants: Annotated[
        int, Parameter(help="Number of tenants; the first has the most traffic, 0 writes none.")
    ] = 0,
    seed: Annotated[int, Parameter(help="Equal seeds give equal traces.")] = 1,
    as_json: AsJson = False,
) -> int:
    """Generate a trace with the statistics of the public ones, and describe it.

    For example: `mooncache trace generate my.jsonl --requests 2000 --rate 5`
    """
    need_packages("numpy")
    from mooncache.traces import generate as make
    from mooncache.traces import write
    from mooncache.traces.lengths import Lengths
    from mooncache.traces.stats import stats as figures_of

    options = _preset(kind)(block_tokens=block_tokens, tenants=tenants)
    if kind != TraceKind.SINGLE_TURN:
        options = replace(options, returning=returning)
    elif returning != 1.0:
        raise InvalidArgument(
            f"--returning {returning:g}: requests of --kind single-turn stand alone. Leave it out, or use another kind."
        )
    if requests or seconds:
        options = replace(options, requests=requests or None, duration_s=seconds or None)
    if rate:
        options = replace(options, rate_per_s=rate)
    if input_mean:
        most = float(options.context_tokens)
        options = replace(options, first_tokens=Lengths.lognormal(input_mean, 1.0, most_tokens=most))
    if output_mean:
        options = replace(options, output_tokens=Lengths.lognormal(output_mean, 0.9))
    if not math.isfinite(tick) or (tick < 0 and tick != -1):
        raise InvalidArgument(f"--tick must be 0 or more, or -1 for the kind's own; got {tick:g}.")
    if tick >= 0:
        options = replace(options, tick_s=tick)
    trace = make(options, random.Random(seed))
    if not len(trace):
        raise InvalidArgument("So short a trace has no request. Give more seconds or a higher rate.")
    try:
        write(trace, file)
    except OSError as error:
        raise InvalidArgument(f"{file} cannot be written: {error.strerror}.") from None
    _show(figures_of(trace), str(file), as_json=as_json)
    return EXIT_OK


def _preset(kind: TraceKind) -> Callable[..., GenerateOptions]:
    """The function that makes the options of a kind."""
    from mooncache.traces.generator import conversation, single_turn, tool_agent

    presets = {
        TraceKind.CONVERSATION: conversation,
        TraceKind.TOOL_AGENT: tool_agent,
        TraceKind.SINGLE_TURN: single_turn,
    }
    return presets[kind]


def _show(figures: TraceStats, name: str, *, as_json: bool) -> None:
    if as_json:
        print_json({"file": name, **asdict(figures)})
        return
    from rich.table import Table

    table = Table(title=name, title_justify="left", box=None, pad_edge=False, show_header=False)
    table.add_column(style="dim")
    table.add_column(overflow="fold")
    for row in _rows(figures):
        table.add_row(*row)
    console.print(table)


def _rows(figures: TraceStats) -> list[tuple[str, str]]:
    rows = [
        (
            "requests",
            (
                f"{figures.requests:,} in {human_age(figures.span_s)}, {figures.rate_per_s:.2f}/s, "
                f"at most {figures.requests_at_once_max} with one stamp"
            ),
        ),
        ("input tokens", _lengths(figures.input_tokens, figures.input_mean, figures.input_quantiles)),
        ("output tokens", _lengths(figures.output_tokens, figures.output_mean, figures.output_quantiles)),
        (
            "blocks",
            (
                f"{figures.block_references:,} references to {figures.blocks_unique:,} blocks of "
                f"{figures.block_tokens} tokens; {figures.blocks_mean:.1f} a request, at most {figures.blocks_most}"
            ),
        ),
        (
            "sharing",
            (
                f"{figures.used_once_share:.1%} of the blocks used once; {figures.first_blocks:,} first blocks; "
                f"the top 1 % of blocks have {figures.top_1_percent_share:.1%} of the references"
            ),
        ),
        (
            "unlimited cache",
            (
                f"hits {figures.hit_ratio_blocks:.1%} of blocks, {figures.hit_ratio_tokens:.1%} of tokens; "
                f"{figures.requests_without_hit_share:.1%} of the requests find nothing"
            ),
        ),
    ]
    if figures.reuse_gap_s:
        shown = " ".join(f"{name} {figures.reuse_gap_s[name]:.0f}" for name in ("p50", "p90", "p99"))
        rows.append(("reuse gap", f"{shown} s"))
    for name, count in (("tenants", figures.tenants), ("sessions", figures.sessions)):
        if count is not None:
            rows.append((name, f"{count:,}"))
    return rows


def _lengths(total: int, mean: float, quantiles: object) -> str:
    assert isinstance(quantiles, dict)
    shown = " ".join(f"{name} {quantiles[name]:,.0f}" for name in ("p5", "p50", "p90", "p99", "max"))
    return f"mean {mean:,.0f}; {shown}; {total:,} in all"
