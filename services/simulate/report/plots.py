"""The plots of a report: what is drawn, the sentence that says it in words, and the numbers behind it as a table.

Every drawing is one function from results to a `Drawing`. A policy has the same colour and dash in all of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from mooncache.conductor.core.policy.fleet import PREFILL
from mooncache.simulate.report import figures
from mooncache.simulate.report.figures import Plot, duration_text
from mooncache.simulate.report.summary import (
    Summary,
    busy_share,
    per_window,
    pool_mean,
    windowed_hit_ratio,
)
from mooncache.simulate.report.tables import percent
from mooncache.simulate.result import Result

Floats = NDArray[np.float64]
_TABLE_SHARES = (0.1, 0.25, 0.5, 0.75, 0.9, 0.95, 0.99)
_TABLE_ROWS = 12
_BARS_MAX = 20


@dataclass(frozen=True, slots=True)
class Drawing:
    """One plot with its words and numbers. `columns` and `rows` are text, ready to be shown."""

    plot: Plot
    alt: str
    caption: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


def _quantile_rows(results: Sequence[Result], column: str) -> tuple[tuple[str, ...], ...]:
    return tuple(
        (f"{100 * share:g} %", *(duration_text(result.quantile(column, share)) for result in results))
        for share in _TABLE_SHARES
    )


def _names(results: Sequence[Result]) -> tuple[str, ...]:
    return tuple(result.policy for result in results)


def _distribution(
    results: Sequence[Result], title: str, column: str, promised_s: float, *, log: bool
) -> Plot:
    """The share of all requests that arrived by a column of those that were served."""
    plot = figures.new_figure(title, y_label="% of all requests")
    for order, result in enumerate(results):
        values = getattr(result, column)[result.done]
        figures.cdf(plot, values, result.policy, order=order, of=len(result))
    figures.seconds_axis(plot, log=log)
    figures.limit_line(plot, promised_s, f"promised {duration_text(promised_s)}")
    return plot


def ttft(results: Sequence[Result], summaries: Sequence[Summary]) -> Drawing:
    """Distribution of the time to the first token over all requests that arrived."""
    plot = _distribution(results, "Time to first token", "ttft_s", results[0].ttft_slo_s, log=True)
    summary = "; ".join(
        f"{s.policy}: half within {duration_text(s.ttft_s.p50)}, 99 % within {duration_text(s.ttft_s.p99)}"
        for s in summaries
    )
    return Drawing(
        plot,
        f"Distribution of the time to first token. {summary}.",
        "How many of all requests had their first token within a time. A curve that ends below 100 % refused "
        "or lost the rest.",
        ("share of those served", *_names(results)),
        _quantile_rows(results, "ttft_s"),
    )


def tbt(results: Sequence[Result], summaries: Sequence[Summary]) -> Drawing:
    """Distribution of the time between tokens."""
    plot = _distribution(results, "Time between tokens", "tbt_s", results[0].tbt_slo_s, log=False)
    plot.axes.set_xlim(left=0.0)
    summary = "; ".join(
        f"{s.policy}: mean {duration_text(s.tbt_s.mean)}, 99 % within {duration_text(s.tbt_s.p99)}"
        for s in summaries
    )
    return Drawing(
        plot,
        f"Distribution of the time between tokens. {summary}.",
        "Mean of each request's longest tenth of gaps: the stutter that a reader notices.",
        ("share of those served", *_names(results)),
        _quantile_rows(results, "tbt_s"),
    )


def _over_time(
    results: Sequence[Result], title: str, y_label: str, lines: Sequence[tuple[Floats, Floats]]
) -> tuple[Plot, tuple[tuple[str, ...], ...]]:
    plot = figures.new_figure(title, y_label=y_label)
    for order, (result, (at_s, values)) in enumerate(zip(results, lines, strict=True)):
        figures.line(plot, at_s, values, result.policy, order=order)
    figures.minutes_axis(plot)
    plot.axes.set_ylim(bottom=0.0)
    base = lines[0][0]
    rows = []
    for at in _picked(len(base)):
        row = [float(line[at]) if at < len(line) else float("nan") for _, line in lines]
        rows.append((f"{base[at] / 60:.1f}", *("-" if np.isnan(value) else f"{value:.3g}" for value in row)))
    return plot, tuple(rows)


def _timeline(
    results: Sequence[Result], over_time: tuple[Plot, tuple[tuple[str, ...], ...]], alt: str, caption: str
) -> Drawing:
    """What `_over_time` drew, with its words."""
    plot, rows = over_time
    return Drawing(plot, alt, caption, ("minute", *_names(results)), rows)


def _picked(count: int) -> list[int]:
    """A few places, evenly spread, from the first to the last."""
    steps = min(count, _TABLE_ROWS)
    return [round(at * (count - 1) / max(1, steps - 1)) for at in range(steps)]


def _mean(values: Floats) -> float:
    known = values[np.isfinite(values)]
    return float(known.mean()) if known.size else 0.0


def load(results: Sequence[Result], *, decode: bool) -> Drawing:
    """Mean load of a pool over time, in shares of the promise."""
    pool, promise = ("Decode", "TBT") if decode else ("Prefill", "TTFT")
    lines = []
    for result in results:
        column = result.series.decode_load if decode else result.series.prefill_load
        lines.append((result.series.at_s, 100 * pool_mean(result, column, decode=decode)))
    drawn = _over_time(results, f"{pool} load", f"% of the promised {promise}", lines)
    if any(np.nanmax(values, initial=0.0) > 90.0 for _, values in lines):
        figures.limit_line(drawn[0], 100.0, "limit", vertical=False)
    summary = ", ".join(
        f"{r.policy} {_mean(values):.0f} % on average, {np.nanmax(values, initial=0.0):.0f} % at most"
        for r, (_, values) in zip(results, lines, strict=True)
    )
    meaning = "step time over the promised TBT" if decode else "expected queueing over the promised TTFT"
    return _timeline(
        results,
        drawn,
        f"{pool} load over time: {summary}.",
        f"Mean over the instances of the pool: {meaning}.",
    )


def queue(results: Sequence[Result]) -> Drawing:
    """Requests that wait for their prompt to be computed."""
    lines = [(r.series.at_s, r.series.queue_requests.sum(axis=1).astype(np.float64)) for r in results]
    drawn = _over_time(results, "Queue", "prompts waiting", lines)
    summary = ", ".join(
        f"{r.policy} {v.max(initial=0.0):.0f}" for r, (_, v) in zip(results, lines, strict=True)
    )
    return _timeline(
        results,
        drawn,
        f"Prompts that wait over time; most at once: {summary}.",
        "Prompts that are assigned and not yet being computed, all instances together.",
    )


def hit_ratio(results: Sequence[Result], summaries: Sequence[Summary]) -> Drawing:
    """Share of prompt tokens that were not computed, sample by sample."""
    lines = []
    for result in results:
        at_s, ratio = windowed_hit_ratio(result)
        lines.append((at_s, 100 * _smooth(ratio)))
    drawn = _over_time(results, "Hit ratio", "% of prompt tokens", lines)
    summary = ", ".join(f"{s.policy} {percent(s.hit_ratio)}" for s in summaries)
    return _timeline(
        results,
        drawn,
        f"Hit ratio over time. Whole run: {summary}.",
        "Prompt tokens whose KV was cached, over the last minute or so. It climbs while caches fill.",
    )


def _smooth(values: Floats, width: int = 5) -> Floats:
    """Mean of the last few samples that are known: one sample holds only some requests."""
    out = np.full(len(values), np.nan)
    for at in range(len(values)):
        known = values[max(0, at - width + 1) : at + 1]
        known = known[np.isfinite(known)]
        if known.size:
            out[at] = known.mean()
    return out


def goodput(results: Sequence[Result], summaries: Sequence[Summary]) -> Drawing:
    """Requests that kept both promises, by when they arrived, beside all that arrived."""
    windows = [per_window(result) for result in results]
    lines = [(at_s, kept) for at_s, _, kept in windows]
    drawn = _over_time(results, "Goodput", "requests per second", lines)
    figures.line(drawn[0], windows[0][0], windows[0][1], "arrived", faint=True)
    drawn[0].axes.set_ylim(0.0, 1.08 * max([0.1, *windows[0][1].tolist()]))
    summary = ", ".join(f"{s.policy} {percent(s.attainment)}" for s in summaries)
    return _timeline(
        results,
        drawn,
        f"Requests per second that kept both promises. Of all requests: {summary}.",
        "Served within both promises, by time of arrival. The distance to the grey line is what was lost.",
    )


def replicas(result: Result, order: int = 0) -> Drawing | None:
    """Copies of watched blocks under one policy; None when nothing was watched."""
    series = result.series
    if not series.watched or not len(series.at_s):
        return None
    plot = figures.new_figure(f"Copies of a block ({result.policy})", y_label="nodes that hold it")
    for number, rank in enumerate(series.watched_rank):
        figures.line(plot, series.at_s, series.replicas[:, number], f"rank {rank:,}", order=order + number)
    figures.minutes_axis(plot)
    plot.axes.set_ylim(bottom=0.0)
    rows = tuple(
        (f"{series.at_s[at] / 60:.1f}", *(str(int(count)) for count in series.replicas[at]))
        for at in _picked(len(series.at_s))
    )
    most = ", ".join(
        f"rank {rank:,}: {int(series.replicas[:, n].max())}" for n, rank in enumerate(series.watched_rank)
    )
    return Drawing(
        plot,
        f"Copies of blocks by how often they hit; most at once: {most}.",
        "How many nodes hold a block, for blocks of different rank by hits: hot ones spread by being used.",
        ("minute", *(f"rank {rank:,}" for rank in series.watched_rank)),
        rows,
    )


def roles(results: Sequence[Result]) -> Drawing | None:
    """Prefill instances over time; None when no policy changed any role."""
    if not any(result.totals.role_switches for result in results):
        return None
    lines = [(r.series.at_s, (r.series.role == PREFILL).sum(axis=1).astype(np.float64)) for r in results]
    drawn = _over_time(results, "Prefill instances", "instances", lines)
    summary = ", ".join(f"{r.policy} {r.totals.role_switches}" for r in results)
    return _timeline(
        results,
        drawn,
        f"Prefill instances over time; role switches: {summary}.",
        "Instances change between prefill and decode as the load asks for it.",
    )


def busy(result: Result) -> Drawing:
    """How much of the time each instance computed."""
    share, names = 100 * busy_share(result), result.instances.names
    shown = np.arange(len(names))
    if len(names) > _BARS_MAX:
        ordered = np.argsort(-share, kind="stable")
        shown = ordered[np.linspace(0, len(names) - 1, _BARS_MAX).astype(int)]
    labels = [names[row] for row in shown]
    plot = figures.new_figure(
        f"Busy instances ({result.policy})", x_label="% of the time", height_in=1.0 + 0.19 * len(labels)
    )
    figures.bars(plot, labels, {"busy": share[shown]}, text=lambda value: f"{value:.0f} %")
    return Drawing(
        plot,
        f"Share of time that instances computed: from {share.min():.0f} % to {share.max():.0f} %.",
        "Even bars mean that no request waits while instances idle."
        + (f" {_BARS_MAX} of {len(names)}, evenly picked by load." if len(names) > _BARS_MAX else ""),
        ("instance", "busy", "requests", "computed tokens"),
        tuple(
            (
                names[row],
                f"{share[row]:.0f} %",
                f"{int(result.instances.requests[row]):,}",
                f"{int(result.instances.computed_tokens[row]):,}",
            )
            for row in shown
        ),
    )


def drawings(results: Sequence[Result], summaries: Sequence[Summary]) -> list[Drawing]:
    """All plots of a report, in reading order."""
    made: list[Drawing | None] = [
        ttft(results, summaries),
        tbt(results, summaries),
        goodput(results, summaries),
        queue(results),
        load(results, decode=False),
        load(results, decode=True),
        hit_ratio(results, summaries),
        roles(results),
        replicas(results[0]),
        busy(results[0]),
    ]
    return [drawing for drawing in made if drawing is not None]
