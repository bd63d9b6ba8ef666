"""Runs as tables on a terminal: one run in detail with what it means, several side by side."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from mooncache.simulate.report.figures import duration_text
from mooncache.simulate.report.summary import Spread, Summary, busy_share, limiting
from mooncache.simulate.result import Result

_PlotColumns = tuple[tuple[str, list[float], bool], ...]
"""(title, a figure of each run, whether more is better)"""
_INSTANCES_MAX = 24
_WORDS = {
    "TTFT": "time to first token: from arrival to the first token of the answer",
    "TBT": "time between tokens: mean of a request's longest tenth of gaps",
    "attainment": "share of all requests that were served within both promises",
    "goodput": "requests per second that kept both promises",
    "hit ratio": "prompt tokens that were not computed because their KV was cached",
}


def percent(share: float) -> str:
    """0.9437 -> "94.4 %"."""
    return "-" if math.isnan(share) else f"{100 * share:.1f} %"


def bytes_text(size: float) -> str:
    """2.5e12 -> "2.5 TB" (decimal, as links are sold)."""
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if size < 1000 or unit == "TB":
            return f"{size:.3g} {unit}" if size < 1000 else f"{size:,.0f} {unit}"
        size /= 1000
    raise AssertionError("unreachable")


def _table(title: str, columns: Sequence[str]) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold", box=SIMPLE_HEAD, pad_edge=False)
    for number, column in enumerate(columns):
        table.add_column(
            column, justify="right" if number else "left", no_wrap=not number or column == "busy"
        )
    return table


def _spread(name: str, spread: Spread) -> tuple[str, ...]:
    return (name, *(duration_text(v) for v in (spread.mean, spread.p50, spread.p90, spread.p99)))


def show_run(console: Console, result: Result, summary: Summary) -> None:
    """One run in detail."""
    times = _table(f"Times under policy {summary.policy}", ("", "mean", "p50", "p90", "p99"))
    for name, spread in (
        ("TTFT", summary.ttft_s),
        ("TBT", summary.tbt_s),
        ("queue", summary.queue_s),
        ("fetch of a prefix", summary.fetch_s),
        ("computing the prompt", summary.prefill_s),
    ):
        times.add_row(*_spread(name, spread))
    console.print(times)
    console.print(_totals(result, summary))
    console.print(_instances(result))
    console.print(f"[bold]Bottleneck:[/] {limiting(summary)}", soft_wrap=True)


def _totals(result: Result, summary: Summary) -> Table:
    table = _table("Outcome", ("what", "value", "of all"))
    total = max(1, summary.requests)
    table.add_row("requests", f"{summary.requests:,}", "")
    for name, count in summary.outcomes.items():
        if count:
            table.add_row(f"  {name.replace('_', ' ')}", f"{count:,}", percent(count / total))
    for reason, count in list(summary.reasons.items())[:4]:
        table.add_row(f"    because of {reason}", f"{count:,}", percent(count / total))
    for name, count in summary.branches.items():
        table.add_row(f"  prefix by {name}", f"{count:,}", percent(count / total))
    table.add_row(f"TTFT within {duration_text(result.ttft_slo_s)}", "", percent(summary.ttft_within))
    table.add_row(f"TBT within {duration_text(result.tbt_slo_s)}", "", percent(summary.tbt_within))
    table.add_row("attainment (both)", "", f"[bold]{percent(summary.attainment)}[/]")
    table.add_row("goodput", f"{summary.goodput_per_s:.2f} /s", "")
    table.add_row("hit ratio", percent(summary.hit_ratio), "")
    table.add_row("  over that of a pool without limit", percent(summary.hits_of_unlimited), "")
    table.add_row("  fetched from another node", percent(summary.fetched_ratio), "")
    table.add_row("computing per prompt", duration_text(summary.gpu_s_per_request), "")
    table.add_row("prefixes fetched", bytes_text(summary.bytes_fetched), "")
    table.add_row("handed over to decode", bytes_text(summary.bytes_handed_over), "")
    for name, size in (("copied ahead", summary.bytes_replicated), ("read from SSD", summary.bytes_ssd)):
        if size:
            table.add_row(name, bytes_text(size), "")
    for name, count in (("role switches", summary.role_switches), ("tried again", summary.retries)):
        if count:
            table.add_row(name, f"{count:,}", "")
    return table


def _instances(result: Result) -> Table:
    instances, busy = result.instances, busy_share(result)
    shown = list(range(len(instances.names)))
    title = "Load of the instances"
    if len(shown) > _INSTANCES_MAX:
        order = np.argsort(-busy, kind="stable")
        shown = [int(row) for row in (*order[: _INSTANCES_MAX // 2], *order[-_INSTANCES_MAX // 2 :])]
        title += f" (the busiest and the idlest of {len(instances.names)})"
    table = _table(title, ("instance", "role", "busy", "requests", "computed tokens", "sequences"))
    for row in shown:
        bar = "█" * round(8 * float(busy[row]))
        table.add_row(
            instances.names[row],
            instances.role[row],
            f"[cyan]{bar:<8}[/] {float(busy[row]):4.0%}",
            f"{int(instances.requests[row]):,}",
            f"{int(instances.computed_tokens[row]):,}",
            f"{float(instances.sequences_mean[row]):.1f}",
        )
    return table


def show_comparison(console: Console, summaries: Sequence[Summary]) -> None:
    """Several policies over the same requests; the best of each column is bold."""
    times: _PlotColumns = (
        ("TTFT mean", [s.ttft_s.mean for s in summaries], False),
        ("p50", [s.ttft_s.p50 for s in summaries], False),
        ("p90", [s.ttft_s.p90 for s in summaries], False),
        ("p99", [s.ttft_s.p99 for s in summaries], False),
        ("TBT mean", [s.tbt_s.mean for s in summaries], False),
        ("p99", [s.tbt_s.p99 for s in summaries], False),
    )
    rates: _PlotColumns = (
        ("attainment", [s.attainment for s in summaries], True),
        ("goodput", [s.goodput_per_s for s in summaries], True),
        ("refused", [_refused(s) / max(1, s.requests) for s in summaries], False),
        ("hit ratio", [s.hit_ratio for s in summaries], True),
        ("of max", [s.hits_of_unlimited for s in summaries], True),
        ("per prompt", [s.gpu_s_per_request for s in summaries], False),
    )
    for title, columns in (("Times, the best in bold", times), ("Promises, reuse, computing", rates)):
        table = _table(title, ("policy", *(name for name, _, _ in columns)))
        for row, summary in enumerate(summaries):
            cells = [_cell(name, values, row, most=most) for name, values, most in columns]
            table.add_row(summary.policy, *cells)
        console.print(table)


def _refused(summary: Summary) -> int:
    return summary.outcomes.get("rejected", 0) + summary.outcomes.get("rejected_after_prefill", 0)


def _cell(name: str, values: list[float], row: int, *, most: bool) -> str:
    value = values[row]
    if name in {"attainment", "refused", "hit ratio", "of max"}:
        text = percent(value)
    elif name == "goodput":
        text = f"{value:.2f} /s"
    else:
        text = duration_text(value)
    known = [other for other in values if not math.isnan(other)]
    best = bool(known) and value == (max(known) if most else min(known)) and len(set(known)) > 1
    return f"[bold green]{text}[/]" if best else text


def show_words(console: Console) -> None:
    """What the words in the tables mean."""
    for word, meaning in _WORDS.items():
        console.print(f"[dim][bold]{word}[/bold]: {meaning}[/dim]", soft_wrap=True)


def show_about(console: Console, about: dict[str, Any], summaries: Sequence[Summary]) -> None:
    """What was simulated, in two lines."""
    instances = ", ".join(f"{count} {name}" for name, count in about["instances"].items())
    console.print(
        f"[bold]{about['requests']:,} requests[/] ({about['trace']}, speed {about['speed']:g}, "
        f"{duration_text(summaries[0].span_s)}) on [bold]{about['cluster']}[/]: {instances}; {about['model']}",
        soft_wrap=True,
    )
    wall_s = sum(summary.wall_s for summary in summaries)
    console.print(f"[dim]simulated in {duration_text(wall_s)}, seed {about['seed']}[/]", soft_wrap=True)
