"""Prometheus text -> numbers: sums over labels, and a quantile of a histogram."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping

_LINE = re.compile(r"([a-zA-Z_:][\w:]*)(?:\{(.*)\})? (\S+)")
_LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')

MetricSamples = dict[tuple[str, frozenset[tuple[str, str]]], float]
"""(name, labels) -> value."""


def parse(text: str) -> MetricSamples:
    """Samples of a text exposition; comments and malformed lines are skipped."""
    found: MetricSamples = {}
    for line in text.splitlines():
        if line.startswith("#") or not (match := _LINE.match(line)):
            continue
        try:
            value = float(match[3])
        except ValueError:
            continue
        found[match[1], frozenset(_LABEL.findall(match[2] or ""))] = value
    return found


def total(samples: Mapping[tuple[str, frozenset[tuple[str, str]]], float], name: str, **labels: str) -> float:
    """Sum of `name` over all samples that carry `labels`; 0 when there are none."""
    wanted = set(labels.items())
    return sum(value for (found, has), value in samples.items() if found == name and wanted <= has)


def buckets(samples: MetricSamples, name: str) -> dict[float, float]:
    """Upper bound -> cumulative count of a histogram, summed over its other labels; buckets without a bound are left
    out."""
    found: dict[float, float] = {}
    for (sample, labels), value in samples.items():
        bound = _number(dict(labels).get("le", "inf")) if sample == f"{name}_bucket" else None
        if bound is not None:
            found[bound] = found.get(bound, 0.0) + value
    return found


def _number(text: str) -> float | None:
    """The number that a text is; None for any other text, and for NaN."""
    try:
        value = float(text)
    except ValueError:
        return None
    return None if math.isnan(value) else value


def quantile(bounds: Mapping[float, float], share: float) -> float | None:
    """The value below which `share` of a histogram's observations lie, interpolated inside its bucket.

    That is how Prometheus' histogram_quantile does it. None without observations; the last finite bound when the
    quantile lies beyond it.
    """
    ordered = sorted(bounds.items())
    if not ordered or ordered[-1][1] <= 0:
        return None
    rank = share * ordered[-1][1]
    lower, below = 0.0, 0.0
    for bound, count in ordered:
        if count >= rank:
            if math.isinf(bound):
                return lower
            inside = count - below
            return bound if inside <= 0 else lower + (bound - lower) * (rank - below) / inside
        lower, below = bound, count
    return lower


def difference(after: Mapping[float, float], before: Mapping[float, float]) -> dict[float, float]:
    """A histogram's observations between two moments; `after` alone when the process was restarted in between."""
    if any(before.get(bound, 0.0) > count for bound, count in after.items()):
        return dict(after)
    return {bound: count - before.get(bound, 0.0) for bound, count in after.items()}


def increase(after: float, before: float) -> float:
    """Growth of a counter; after a restart it began at 0 again."""
    return after if after < before else after - before


def share_of(part: float, whole: float) -> float | None:
    """part / whole, None without a whole."""
    return part / whole if whole > 0 else None
