"""Runs for programs: rows in the form of `mooncache bench`, and a summary for each policy.

NaN is not JSON: a value that no request got is null. Nothing in the document depends on when or how fast it was made,
apart from the field `wall_s`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

from mooncache.reporting.rows import Row, bar_row
from mooncache.simulate.report.summary import Summary

_FIGURES: tuple[tuple[str, str, Callable[[Summary], float]], ...] = (
    ("mean TTFT", "s", lambda s: s.ttft_s.mean),
    ("P90 TTFT", "s", lambda s: s.ttft_s.p90),
    ("P99 TTFT", "s", lambda s: s.ttft_s.p99),
    ("mean TBT", "s", lambda s: s.tbt_s.mean),
    ("P99 TBT", "s", lambda s: s.tbt_s.p99),
    ("attainment", "share", lambda s: s.attainment),
    ("goodput", "requests/s", lambda s: s.goodput_per_s),
    ("hit ratio", "share", lambda s: s.hit_ratio),
    ("computing per prompt", "s", lambda s: s.gpu_s_per_request),
    ("refused", "requests", lambda s: s.outcomes["rejected"] + s.outcomes["rejected_after_prefill"]),
)


def rows(summaries: Sequence[Summary]) -> list[Row]:
    """One row per policy and figure; ratios are to the policy named last, the one that others are measured by."""
    made = []
    for summary in summaries:
        for name, unit, figure in _FIGURES:
            value, reference = float(figure(summary)), float(figure(summaries[-1]))
            title = f"{summary.policy}: {name}"
            if len(summaries) > 1 and summary is not summaries[-1] and math.isfinite(reference):
                against = f"{summaries[-1].policy}: {name}"
                made.append(bar_row(title, value, unit, against=against, reference=reference))
            else:
                made.append(Row(title, value, unit))
    return made


def document(summaries: Sequence[Summary], about: dict[str, object]) -> dict[str, object]:
    """The whole answer: what was simulated, rows, a summary per policy."""
    found: dict[str, Any] = plain(
        {
            "about": about,
            "rows": [asdict(row) for row in rows(summaries)],
            "summaries": [asdict(summary) for summary in summaries],
        }
    )
    return found


def plain(value: Any) -> Any:
    """The same value with null for NaN and infinities, so that any JSON reader takes it."""
    if isinstance(value, dict):
        return {key: plain(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(inner) for inner in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value
