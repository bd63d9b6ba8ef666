"""A report as one HTML page that needs nothing else: no network, no script, plots inline, numbers as tables too.

Names in it come from files (policies, instances, traces), so all text is escaped.
"""

from __future__ import annotations

import html
import math
from collections.abc import Sequence
from typing import Any

from mooncache.simulate.report import figures, plots
from mooncache.simulate.report.figures import duration_text
from mooncache.simulate.report.html_page import cards, html_page
from mooncache.simulate.report.summary import Summary, limiting
from mooncache.simulate.report.tables import bytes_text, percent
from mooncache.simulate.result import Result

_STYLE = """td.best{font-weight:700;color:var(--c2)}
summary{cursor:pointer;color:var(--muted);font-size:.88rem;padding:4px 0}
.dot{display:inline-block;width:.7em;height:.7em;border-radius:50%;margin-right:.45em}
@media print{details{display:none}}
"""


def page(results: Sequence[Result], summaries: Sequence[Summary], about: dict[str, object]) -> str:
    """The whole page. `about` is that of `document`: cluster, instances, trace, speed, seed, promises.

    Raises:
        Unsupported: matplotlib is not installed.
    """
    drawn = "\n".join(_figure(drawing, n) for n, drawing in enumerate(plots.drawings(results, summaries)))
    title = f"{about['requests']:,} requests on {about['cluster']}"
    return html_page(
        title,
        f"<h1>{html.escape(title)}</h1>\n{_about(about)}\n{_cards(summaries)}\n{_comparison(summaries)}\n"
        f'<h2>Plots</h2>\n<div class="plots">\n{drawn}\n</div>\n{_words()}',
        _STYLE,
    )


def _about(about: dict[str, Any]) -> str:
    instances = ", ".join(f"{count} {name}" for name, count in about["instances"].items())
    text = (
        f"{about['trace']} at speed {about['speed']:g}; {instances}; {about['model']}. Promised: first token within "
        f"{duration_text(about['ttft_slo_s'])}, {duration_text(about['tbt_slo_s'])} between tokens. "
        f"Simulated with seed {about['seed']}."
    )
    return f'<p class="muted">{html.escape(text)}</p>'


def _cards(summaries: Sequence[Summary]) -> str:
    first = summaries[0]
    facts = (
        (percent(first.attainment), "within both promises"),
        (duration_text(first.ttft_s.mean), "mean time to first token"),
        (duration_text(first.ttft_s.p99), "P99 time to first token"),
        (duration_text(first.tbt_s.p99), "P99 time between tokens"),
        (percent(first.hit_ratio), "of prompt tokens not computed"),
        (bytes_text(first.bytes_fetched), "of prefixes fetched"),
        (percent(first.prefill_busy), "prefill busy"),
        (percent(first.decode_busy), "decode busy"),
    )
    head = f"<h2>{html.escape(first.policy)}</h2>" if len(summaries) > 1 else ""
    return f"{head}<p>{html.escape(limiting(first))}</p>{cards(facts)}"


_COLUMNS: tuple[tuple[str, Any, Any, bool], ...] = (
    # title, figure, how it is written, whether more is better
    ("TTFT mean", lambda s: s.ttft_s.mean, duration_text, False),
    ("P50", lambda s: s.ttft_s.p50, duration_text, False),
    ("P90", lambda s: s.ttft_s.p90, duration_text, False),
    ("P99", lambda s: s.ttft_s.p99, duration_text, False),
    ("TBT mean", lambda s: s.tbt_s.mean, duration_text, False),
    ("P99", lambda s: s.tbt_s.p99, duration_text, False),
    ("attainment", lambda s: s.attainment, percent, True),
    ("goodput /s", lambda s: s.goodput_per_s, lambda v: f"{v:.2f}", True),
    ("hit ratio", lambda s: s.hit_ratio, percent, True),
    ("s per prompt", lambda s: s.gpu_s_per_request, duration_text, False),
    (
        "refused",
        lambda s: s.outcomes["rejected"] + s.outcomes["rejected_after_prefill"],
        "{:,}".format,
        False,
    ),
)


def _comparison(summaries: Sequence[Summary]) -> str:
    heads = "".join(f'<th scope="col">{html.escape(name)}</th>' for name, _, _, _ in _COLUMNS)
    best = {}
    for at, (_, figure, _, most) in enumerate(_COLUMNS):
        known = [value for value in map(figure, summaries) if not math.isnan(value)]
        if len(set(known)) > 1:
            best[at] = max(known) if most else min(known)
    lines = []
    for row, summary in enumerate(summaries):
        dot = f'<span class="dot" style="background:var(--c{row % len(figures.SERIES)})"></span>'
        cells = []
        for at, (_, figure, text, _) in enumerate(_COLUMNS):
            mark = ' class="best"' if best.get(at) == figure(summary) else ""
            cells.append(f"<td{mark}>{html.escape(text(figure(summary)))}</td>")
        name = html.escape(summary.policy)
        lines.append(f'<tr><th scope="row">{dot}{name}</th>{"".join(cells)}</tr>')
    return (
        '<h2>In numbers</h2><div class="scroll"><table><thead><tr><th scope="col">policy</th>'
        f"{heads}</tr></thead><tbody>{''.join(lines)}</tbody></table></div>"
    )


def _figure(drawing: plots.Drawing, number: int) -> str:
    heads = "".join(f'<th scope="col">{html.escape(column)}</th>' for column in drawing.columns)
    lines = "".join(
        "<tr>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in row) + "</tr>" for row in drawing.rows
    )
    return (
        f"<figure>{figures.svg(drawing.plot, drawing.alt, prefix=f'p{number}')}"
        f"<figcaption>{html.escape(drawing.caption)}</figcaption>"
        f'<details><summary>Numbers</summary><div class="scroll"><table><thead><tr>{heads}</tr></thead>'
        f"<tbody>{lines}</tbody></table></div></details></figure>"
    )


def _words() -> str:
    return (
        '<h2>Words</h2><p class="muted"><b>TTFT</b>: from arrival to the first token of the answer. <b>TBT</b>: mean '
        "of a request's longest tenth of gaps between tokens. <b>Attainment</b>: share of all requests that were "
        "served within both promises. <b>Goodput</b>: these per second. <b>Hit ratio</b>: prompt tokens that were "
        "not computed because their KV was cached. <b>s per prompt</b>: seconds "
        "of instances for computing one. Quantiles are over requests that were served.</p>"
    )
