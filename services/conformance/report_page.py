"""A report as one HTML page: the verdict, and every promise with what was seen."""

from __future__ import annotations

import html
from itertools import groupby
from typing import Final

from mooncache.conformance.core.verdicts import ConformanceReport, PromiseOutcome
from mooncache.simulate.report import figures
from mooncache.simulate.report.html_page import cards, html_page

_STYLE: Final = """td.pass,h1 .pass{color:var(--c2)}td.fail,h1 .fail{color:var(--limit)}td.na{color:var(--muted)}
td.words,th[scope=row]{text-align:left;white-space:normal}th[scope=row]{width:38%}
"""
_CLASSES: Final = {
    PromiseOutcome.PASS: "pass",
    PromiseOutcome.FAIL: "fail",
    PromiseOutcome.NOT_APPLICABLE: "na",
}


def conformance_page(report: ConformanceReport) -> str:
    """The page of a report."""
    word, style = ("conforms", "pass") if report.kept else ("does not conform", "fail")
    facts = tuple((str(report.count(outcome)), str(outcome)) for outcome in PromiseOutcome)
    about = f"{report.subject}, {figures.duration_text(report.seconds)}. The same tries again: --seed {report.seed}."
    parts = [
        f'<h1>Conformance: <span class="{style}">{word}</span></h1>',
        f'<p class="muted">{html.escape(about)}</p>',
        cards(facts),
    ]
    by_family = sorted(report.verdicts, key=lambda each: list(_families(report)).index(each.promise.family))
    for family, verdicts in groupby(by_family, key=lambda each: each.promise.family):
        lines = "".join(
            f'<tr><th scope="row">{html.escape(each.promise.sentence)}<br><code>{each.promise.name}</code></th>'
            f'<td class="{_CLASSES[each.outcome]}">{each.outcome}</td>'
            f'<td class="words">{html.escape(each.seen)}</td></tr>'
            for each in verdicts
        )
        parts.append(f"<h2>{family.capitalize()}</h2>")
        parts.append(f'<div class="scroll"><table><tbody>{lines}</tbody></table></div>')
    return html_page(f"Conformance: {word}", "\n".join(parts), _STYLE)


def _families(report: ConformanceReport) -> dict[str, None]:
    """Families in the order in which they come."""
    return dict.fromkeys(each.promise.family for each in report.verdicts)
