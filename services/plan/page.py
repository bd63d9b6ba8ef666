"""The page of a plan: one HTML file with everything in it, readable in the dark and on paper."""

from __future__ import annotations

import html
from collections.abc import Iterable, Sequence
from typing import Any, Final

from mooncache.plan import words
from mooncache.plan.answer import PlanReport
from mooncache.plan.core.prices import extras_per_hour
from mooncache.plan.core.spec import Arrangement
from mooncache.simulate.report import figures
from mooncache.simulate.report.html_page import cards, html_page

_STYLE: Final = """.lead{font-size:1.06rem}
th,td{text-align:left;vertical-align:top}.num{text-align:right}
tr.best td{font-weight:600}tr.misses td{color:var(--muted)}td.wrap{white-space:normal}
.word{display:inline-block;border-radius:6px;padding:1px 9px;border:1px solid currentColor;font-weight:600}
.high{color:var(--c2)}.fair{color:var(--c1)}.low{color:var(--limit)}
.note{border-left:3px solid var(--c1);padding:2px 0 2px 12px;margin:8px 0}
@media print{main{max-width:none}}
"""
_BREAKDOWN_MAX: Final = 6


def page(answer: PlanReport, config: str) -> str:
    """The page. Raises Unsupported when matplotlib is not installed."""
    best, slo = answer.best, answer.spec.slo
    ttft = _cdf_plot(answer, "ttft", "Time to first token", slo.ttft_s, log=True)
    tbt = _cdf_plot(answer, "tbt", "Time between tokens", slo.tbt_s, log=False)
    body = [
        "<h1>What to buy</h1>",
        f'<p class="lead">{_text(_sentence(answer))}</p>',
        f'<p class="muted">{_text(words.asked(answer))}. {_text(_scope(answer))}</p>',
        *(f'<p class="note">{_text(note)}</p>' for note in answer.notes),
        _cards(answer),
        _certainty(answer),
        "<h2>Finalists</h2>",
        _table(
            words.FINALIST_COLUMNS,
            ((mark, words.finalist_row(finalist, mark)) for mark, finalist in words.ordered(answer)),
        ),
        '<p class="muted">Latencies and hits are the simulator\'s where it was asked.</p>',
        "<h2>Cost against attainment</h2>",
        f'<div class="plots">{_frontier_plot(answer)}{_breakdown_plot(answer)}</div>',
        _table(words.PARETO_COLUMNS, (("", words.pareto_row(finalist)) for finalist in answer.frontier)),
        '<p class="muted">No other configuration is both cheaper and better, by the statistical model.</p>',
        f'<p class="muted">{_text(words.OVERLOAD_NOTE)}.</p>' if words.overloaded(answer) else "",
        "<h2>The best plan, request by request</h2>",
        f'<div class="plots">{ttft}{tbt}{_hits_plot(answer)}</div>',
        "<h2>Configuration</h2>",
        f"<pre>{_text(config)}</pre>",
    ]
    return html_page(f"Plan: {best.plan.layout.name}", "".join(body), _STYLE)


def _text(value: object) -> str:
    return html.escape(str(value))


def _sentence(answer: PlanReport) -> str:
    layout = answer.best.plan.layout
    prefill, decode = words.counts(layout)
    pipes = f" (pipelines of {layout.stages})" if layout.stages > 1 else ""
    pool = f"{words.size(layout.dram.gb)} of memory"
    pool += f" and {words.size(layout.ssd.gb)} of disks" if layout.ssd.gb else ""
    machines = f"{prefill} for prefill{pipes} and {decode} for decoding"
    if layout.arrangement is Arrangement.BOTH:
        machines = f"{prefill} prefill and decoding"
    elif layout.arrangement is Arrangement.SWITCHING:
        machines += ", with roles that follow the load"
    return (
        f"{machines}, each with {pool} "
        f"for the pool and {layout.nic.gbps:g} Gbit/s: {words.price(answer.best.plan.cost_per_hour)} per hour."
    )


def _scope(answer: PlanReport) -> str:
    return (
        f"Model profile {answer.spec.model.profile}, {answer.layouts_count:,} combinations of machines, memory, disks, "
        "pipelines and network, each with any number of machines."
    )


def _cards(answer: PlanReport) -> str:
    prices, best = answer.best.prices, answer.best
    share = best.estimate.attainment if best.simulated is None else best.simulated
    return cards(
        (
            (words.price(best.plan.cost_per_hour), "per hour"),
            (f"{share:.1%}", "of requests within the SLOs"),
            (words.price(prices.input), "per 1M input tokens"),
            (words.price(prices.cached), "per 1M cached tokens"),
            (words.price(prices.output), "per 1M output tokens"),
        )
    )


def _certainty(answer: PlanReport) -> str:
    certainty = answer.certainty
    if certainty is None:
        return '<h2>How sure</h2><p class="note">Not simulated: numbers are those of the statistical model alone.</p>'
    rows = "".join(
        f"<tr><td>{_text(what)}</td><td class='wrap'>{_text(finding)}</td></tr>"
        for what, finding in words.certainty_lines(certainty, answer.spec.slo.attainment)
    )
    doubts = "".join(f'<p class="note">{_text(_capital(doubt))}.</p>' for doubt in certainty.doubts)
    return (
        f'<h2>How sure <span class="word {certainty.word}">{certainty.word}</span></h2>'
        f'<div class="scroll"><table>{rows}</table></div>{doubts}'
    )


def _capital(sentence: str) -> str:
    return sentence[:1].upper() + sentence[1:]


def _table(columns: Sequence[str], rows: Iterable[tuple[str, Sequence[str]]]) -> str:
    numeric = [column.endswith("*") for column in columns]
    head = "".join(
        f"<th{' class=num' if right else ''}>{_text(column.rstrip('*'))}</th>"
        for column, right in zip(columns, numeric, strict=True)
    )
    lines = []
    for mark, cells in rows:
        tds = "".join(
            f"<td{' class=num' if right else ''}>{_text(cell)}</td>"
            for cell, right in zip(cells, numeric, strict=True)
        )
        lines.append(f'<tr class="{mark.rpartition(" ")[2]}">{tds}</tr>')
    return f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{"".join(lines)}</tbody></table></div>'


def _figure(plot: figures.Plot, alt: str, prefix: str) -> str:
    return f"<figure>{figures.svg(plot, alt, prefix=prefix)}<figcaption>{_text(alt)}</figcaption></figure>"


def _frontier_plot(answer: PlanReport) -> str:
    plot = figures.new_figure(
        "Cost and attainment", x_label="per hour", y_label="requests within both SLOs, %"
    )
    axes = plot.axes
    others = [(plan.cost_per_hour, 100 * plan.attainment) for plan in answer.considered]
    front = [(item.plan.cost_per_hour, 100 * item.plan.attainment) for item in answer.frontier]
    simulated = [
        (item.plan.cost_per_hour, 100 * share)
        for item in answer.finalists
        if (share := item.simulated) is not None
    ]
    _dots(plot, others, "considered", s=9, color=figures.MUTED, alpha=0.35, linewidths=0)
    axes.plot(
        [cost for cost, _ in front], [share for _, share in front], drawstyle="steps-post", marker="o", markersize=3.5,
        linewidth=1.4, color=figures.colour_of(0), label="Pareto set (model)",
    )  # fmt: skip
    plot.labelled += 1
    _dots(plot, simulated, "simulated", s=26, color=figures.colour_of(1), marker="D", zorder=3)
    target = 100 * answer.spec.slo.attainment
    figures.limit_line(plot, target, f"{target:g} % wanted", vertical=False)
    shares = [share for _, share in (*front, *simulated)] or [target]
    axes.set_ylim(max(0.0, min(*shares, target) - 4), 101)
    cost = answer.best.plan.cost_per_hour
    cheapest = min(cost for cost, _ in (*front, *simulated, (cost, target)))
    axes.set_xlim(left=0.94 * cheapest)
    below = [share for other, share in front if other < cost and share < target]
    alt = f"The best plan costs {words.price(cost)} per hour"
    if below:
        alt += f"; what is cheaper keeps at most {max(below):.1f} % within the SLOs, by the model"
    return _figure(plot, alt, "pareto")


def _dots(plot: figures.Plot, points: list[tuple[float, float]], label: str, **style: Any) -> None:
    if points:
        plot.axes.scatter([cost for cost, _ in points], [share for _, share in points], label=label, **style)
        plot.labelled += 1


def _breakdown_plot(answer: PlanReport) -> str:
    plot = figures.new_figure("Where the money goes", x_label="per hour")
    rows = words.ordered(answer)[:_BREAKDOWN_MAX]
    names: list[str] = []
    parts: dict[str, list[float]] = {
        label: [] for label in ("prefill machines", "decode machines", "memory", "disks", "network")
    }
    for mark, finalist in rows:
        layout = finalist.plan.layout
        names.append(mark)
        decode = layout.decode_nodes * layout.decode.node.price_per_hour
        extras = layout.nodes * extras_per_hour(layout)
        parts["prefill machines"].append(finalist.plan.cost_per_hour - decode - extras)
        parts["decode machines"].append(decode)
        parts["memory"].append(layout.nodes * layout.dram.price_per_hour)
        parts["disks"].append(layout.nodes * layout.ssd.price_per_hour)
        parts["network"].append(layout.nodes * layout.nic.price_per_hour)
    used = {label: values for label, values in parts.items() if any(values)}
    figures.bars(plot, names, used, text=words.price)
    return _figure(plot, "Finalists in the order of the table, parts of their price", "cost")


def _cdf_plot(answer: PlanReport, name: str, title: str, limit_s: float, *, log: bool) -> str:
    plot = figures.new_figure(title, y_label="requests, %")
    model, count = answer.curves[f"model_{name}_s"], int(answer.curves["requests"][0])
    simulated = answer.curves.get(f"simulated_{name}_s")
    if simulated is not None:
        figures.cdf(plot, simulated, "simulator", order=0, of=count)
    figures.cdf(plot, model, "statistical model", order=1, of=count)
    figures.limit_line(plot, limit_s, f"{figures.duration_text(limit_s)} promised")
    figures.seconds_axis(plot, log=log)
    values = simulated or model
    within = sum(value <= limit_s for value in values) / max(count, 1)
    return _figure(plot, f"{within:.1%} of the requests are within {figures.duration_text(limit_s)}", name)


def _hits_plot(answer: PlanReport) -> str:
    plot = figures.new_figure("Pool size and hits", x_label="pool, GB", y_label="prompt tokens cached, %")
    figures.line(
        plot, answer.curves["pool_gb"], [100 * share for share in answer.curves["hit_ratio"]], "this workload"
    )
    plot.axes.set_xscale("log")
    layout = answer.best.plan.layout
    pool_gb = layout.nodes * (layout.dram.gb + layout.ssd.gb)
    figures.limit_line(plot, pool_gb, f"best plan: {words.size(pool_gb)}")
    plot.axes.set_ylim(bottom=0)
    return _figure(
        plot,
        f"The best plan's pool reaches {answer.best.estimate.hit_ratio:.0%} of all prompt tokens",
        "hits",
    )
