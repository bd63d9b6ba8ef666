"""What panels are made of: titles, units, and the shapes of queries that occur again and again."""

from __future__ import annotations

from dataclasses import dataclass

RATE = "[$__rate_interval]"
SAMPLED = "mooncache_store_node_store_sampled_%s_total"


@dataclass(frozen=True)
class Panel:
    """`queries` are (PromQL, legend). Units are Grafana's: s, Bps, reqps, percentunit ..."""

    title: str
    text: str
    unit: str
    queries: tuple[tuple[str, str], ...]
    stacked: bool = False


def rate(metric: str, *labels: str) -> str:
    """Growth per second, summed over everything but `labels`."""
    by = f" by ({', '.join(labels)})" if labels else ""
    return f"sum{by} (rate({metric}{RATE}))"


def quantiles(metric: str, *labels: str) -> tuple[tuple[str, str], ...]:
    """Median and 99th percentile of a histogram."""
    legend = " ".join(f"{{{{{label}}}}}" for label in labels)
    by = ", ".join((*labels, "le"))
    return tuple(
        (
            f"histogram_quantile({share}, sum by ({by}) (rate({metric}_bucket{RATE})))",
            f"{name} {legend}".strip(),
        )
        for share, name in ((0.5, "p50"), (0.99, "p99"))
    )


def over(part: str, whole: str) -> str:
    """One query divided by another with the same labels."""
    return f"{part} / {whole}"


def shares(metric: str, label: str) -> str:
    """The part of each value of `label` in the whole."""
    return f"{rate(metric, label)} / ignoring({label}) group_left {rate(metric)}"
