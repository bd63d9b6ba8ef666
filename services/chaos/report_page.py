"""A run as one HTML page: the verdict, every promise, a line of time with faults and answers, each fault in figures."""

from __future__ import annotations

import html
from collections.abc import Sequence

import numpy as np

from mooncache.chaos.core.records import Outcome, Record
from mooncache.chaos.core.verdict import ChaosVerdict, FaultFigures, until_s
from mooncache.simulate.report import figures
from mooncache.simulate.report.html_page import cards, html_page

_STYLE = """td.kept,h1 .kept{color:var(--c2)}td.broken,h1 .broken{color:var(--limit)}
td.words{text-align:left;white-space:normal}
.plots{grid-template-columns:minmax(0,1fr)}
"""
_WIDTH_IN = 9.6


def report_page(record: Record, verdict: ChaosVerdict) -> str:
    """The page. Raises Unsupported: matplotlib is not installed."""
    word, style = ("every promise kept", "kept") if verdict.kept else ("a promise was broken", "broken")
    title = f"Chaos: {word}"
    right = [answer for answer in record.answers if answer.outcome is Outcome.RIGHT]
    prompt = sum(answer.prompt_tokens for answer in right)
    facts = (
        (f"{len(record.injections)}", "faults"),
        (f"{len(right):,}", "answers, each compared"),
        (f"{sum(a.outcome is Outcome.WRONG for a in record.answers)}", "wrong answers"),
        (f"{sum(a.outcome is Outcome.FAILED for a in record.answers)}", "requests that failed"),
        (f"{sum(a.cached_tokens for a in right) / max(1, prompt):.0%}", "of prompt tokens from caches"),
        (f"{sum(each.flipped for each in record.injections):,}", "bits changed"),
        (f"{record.pool.read:,}", "blocks read from the pool"),
    )
    about = (
        f"{record.cluster}, model {record.model}, {figures.duration_text(record.seconds)}. "
        f"The same faults again: --seed {record.seed}. Every answer was compared with one for which nothing was cached."
    )
    body = (
        f'<h1>Chaos: <span class="{style}">{word}</span></h1>\n<p class="muted">{html.escape(about)}</p>\n'
        f"{cards(facts)}\n<h2>Promises</h2>{_promises(verdict)}\n<h2>Line of time</h2>\n"
        f'<div class="plots">{_lanes(record)}{_answers(record)}</div>\n<h2>Faults</h2>{_faults(verdict.faults)}'
    )
    return html_page(title, body, _STYLE)


def _promises(verdict: ChaosVerdict) -> str:
    lines = "".join(
        f'<tr><th scope="row">{html.escape(check.promise)}</th>'
        f'<td class="{"kept" if check.kept else "broken"}">{"kept" if check.kept else "broken"}</td>'
        f'<td class="words">{html.escape(check.seen)}</td></tr>'
        for check in verdict.checks
    )
    return f'<div class="scroll"><table><tbody>{lines}</tbody></table></div>'


def _lanes(record: Record) -> str:
    """What was broken when, and how long until all was well and until a new request was answered."""
    names = list(dict.fromkeys(each.fault.name for each in record.injections)) or ["none"]
    broken: list[tuple[int, float, float]] = []
    heals: list[tuple[int, float, float]] = []
    serves: list[tuple[int, float, float]] = []
    for each in record.injections:
        row, end_s = names.index(each.fault.name), max(each.ended_s, each.begun_s)
        well_s = min(until_s(each), record.seconds)
        broken.append((row, each.begun_s, max(end_s, each.begun_s + record.seconds / 400)))
        heals.append((row, end_s, well_s))
        serves.append((row, well_s, each.served_s if each.served_s is not None else record.seconds))
    plot = figures.new_figure(
        "Faults, and how long each is noticed",
        x_label="seconds",
        width_in=_WIDTH_IN,
        height_in=1.2 + 0.26 * len(names),
    )
    parts = {"broken": broken, "until every part is well": heals, "until a new request is answered": serves}
    figures.intervals(plot, names, parts)
    plot.axes.set_xlim(0, record.seconds)
    alt = f"{len(record.injections)} faults on a line of time"
    return _figure(
        plot,
        alt,
        "Each row is a kind of fault. A request that is sent later than the last colour is served.",
        0,
    )


def _answers(record: Record) -> str:
    """Time to the first token of every answer, and the requests that did not end well."""
    plot = figures.new_figure(
        "Time to first token of every answer", x_label="seconds", y_label="seconds", width_in=_WIDTH_IN
    )
    right = [answer for answer in record.answers if answer.outcome is Outcome.RIGHT]
    bad = [answer for answer in record.answers if answer.outcome is not Outcome.RIGHT]
    for each in record.injections:
        plot.axes.axvspan(
            each.begun_s, min(until_s(each), record.seconds), color=figures.GRID, alpha=0.6, linewidth=0
        )
    plot.axes.scatter(
        np.array([a.ended_s for a in right]),
        np.array([a.ttft_s for a in right]),
        s=6,
        color=figures.colour_of(0),
        label="right",
        linewidths=0,
    )
    if bad:
        plot.axes.scatter(
            np.array([a.ended_s for a in bad]),
            np.zeros(len(bad)),
            s=22,
            marker="x",
            color=figures.LIMIT,
            label="failed",
            linewidths=1.2,
        )
    plot.labelled += 1 + bool(bad)
    plot.axes.set_xlim(0, record.seconds)
    plot.axes.set_ylim(bottom=0)
    alt = f"{len(right)} right answers, {len(bad)} others"
    return _figure(plot, alt, "Grey: from a fault until every part is well again.", 1)


def _faults(found: Sequence[FaultFigures]) -> str:
    heads = (
        "at",
        "fault",
        "target",
        "row",
        "all well after",
        "served after",
        "right meanwhile",
        "failed",
        "worst TTFT",
    )
    lines = []
    for each in found:
        injection = each.injection
        cells = (
            injection.fault.name,
            injection.target,
            injection.fault.row,
            _after(injection.well_s, injection.begun_s, injection.waits_for),
            _after(injection.served_s, injection.begun_s, ""),
            f"{each.right:,}",
            f"{each.failed:,}",
            figures.duration_text(each.worst_ttft_s),
        )
        lines.append(
            f'<tr><th scope="row">{injection.begun_s:.1f} s</th>'
            + "".join(f"<td>{html.escape(cell)}</td>" for cell in cells)
            + "</tr>"
        )
    head = "".join(f'<th scope="col">{html.escape(name)}</th>' for name in heads)
    return (
        f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{"".join(lines)}</tbody></table></div>'
        '<p class="muted">Row: of the contract in docs/recovery.md, which says what each fault may cost.</p>'
    )


def _after(moment_s: float | None, begun_s: float, otherwise: str) -> str:
    return figures.duration_text(moment_s - begun_s) if moment_s is not None else f"never: {otherwise}"


def _figure(plot: figures.Plot, alt: str, caption: str, number: int) -> str:
    drawn = figures.svg(plot, alt, prefix=f"p{number}")
    return f"<figure>{drawn}<figcaption>{html.escape(caption)}</figcaption></figure>"
