"""Two looks at a cluster -> what happens in it: rates, shares and medians, as one plain document."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from mooncache.cli.core.samples import (
    MetricSamples,
    buckets,
    difference,
    increase,
    quantile,
    share_of,
    total,
)

LOCAL_GATEWAY = "gateway"
_GATEWAY = "mooncache_gateway_"
_NODE = "mooncache_store_node_"


def gateway_activity(now: MetricSamples, before: MetricSamples, interval_s: float) -> dict[str, object]:
    """Requests and tokens a second, share of prompt tokens that came from a cache, median TTFT.

    Shares and medians are those of the interval when anything ended in it, else those since the gateway started.
    """

    def grown(name: str) -> float:
        return increase(total(now, _GATEWAY + name), total(before, _GATEWAY + name))

    prompt, cached = grown("prompt_tokens_total"), grown("cached_tokens_total")
    share = share_of(cached, prompt)
    if share is None:
        share = share_of(
            total(now, _GATEWAY + "cached_tokens_total"), total(now, _GATEWAY + "prompt_tokens_total")
        )
    seen = buckets(now, _GATEWAY + "ttft_seconds")
    ttft_s = quantile(difference(seen, buckets(before, _GATEWAY + "ttft_seconds")), 0.5)
    if ttft_s is None:
        ttft_s = quantile(seen, 0.5)
    return {
        "requests_per_s": grown("requests_total") / interval_s,
        "errors_per_s": grown("errors_total") / interval_s,
        "prompt_tokens_per_s": prompt / interval_s,
        "output_tokens_per_s": grown("output_tokens_total") / interval_s,
        "cached_share": share,
        "ttft_p50_ms": None if ttft_s is None else ttft_s * 1000.0,
        "requests_open": int(total(now, _GATEWAY + "requests_open")),
        "streams_open": int(total(now, _GATEWAY + "streams_open")),
        "requests_total": int(total(now, _GATEWAY + "requests_total")),
    }


def gateway_samples(metrics: Mapping[str, MetricSamples]) -> dict[str, MetricSamples]:
    """Of the metrics of all parts those of gateways: this machine's part `gateway`, and the others by their URLs."""
    return {name: samples for name, samples in metrics.items() if name == LOCAL_GATEWAY or "://" in name}


def summed_activity(
    now: Mapping[str, MetricSamples], before: Mapping[str, MetricSamples], interval_s: float
) -> dict[str, object] | None:
    """What several gateways do together; None when the figures of none are known.

    A gateway that was not seen at the look before counts from now on, so that it does not look like a burst.
    """
    if not now:
        return None
    return gateway_activity(
        _together(now),
        _together({name: before.get(name, samples) for name, samples in now.items()}),
        interval_s,
    )


def _together(each: Mapping[str, MetricSamples]) -> MetricSamples:
    summed: MetricSamples = {}
    for samples in each.values():
        for key, value in samples.items():
            summed[key] = summed.get(key, 0.0) + value
    return summed


def instance_activity(
    now: Sequence[Mapping[str, Any]], before: Sequence[Mapping[str, Any]], interval_s: float
) -> list[dict[str, Any]]:
    """Rows of instances with tokens a second; `hit_share`: prompt tokens that its own cache or the pool had."""
    earlier = {row["instance_id"]: row for row in before}
    rows = []
    for row in now:
        last = earlier.get(row["instance_id"], {})

        def grown(name: str, row: Mapping[str, Any] = row, last: Mapping[str, Any] = last) -> float:
            return increase(row[name], last.get(name, row[name]))

        hits = row["local_hit_tokens_total"] + row["pool_hit_tokens_total"]
        rows.append(
            {
                **row,
                "prompt_tokens_per_s": grown("prompt_tokens_total") / interval_s,
                "output_tokens_per_s": grown("output_tokens_total") / interval_s,
                "local_hit_tokens_per_s": grown("local_hit_tokens_total") / interval_s,
                "pool_hit_tokens_per_s": grown("pool_hit_tokens_total") / interval_s,
                "hit_share": share_of(hits, hits + row["prompt_tokens_total"]),
            }
        )
    return rows


def node_activity(
    node: Mapping[str, Any], now: MetricSamples, before: MetricSamples, interval_s: float
) -> dict[str, object]:
    """A node's row with its traffic; rates are 0 where its metrics cannot be read."""

    def rate(name: str, **labels: str) -> float:
        if not now:
            return 0.0
        return (
            increase(total(now, _NODE + name, **labels), total(before, _NODE + name, **labels)) / interval_s
        )

    return {
        "node_id": node["node_id"],
        "state": node["state"],
        "capacity_bytes": node["capacity_bytes"],
        "used_bytes": node["used_bytes"],
        "block_count": node["block_count"],
        "pinned_bytes": node["pinned_bytes"],
        "hits_per_s": rate("hits_total"),
        "misses_per_s": rate("misses_total"),
        # A put is one request; a block that is written piece by piece is visible with its commit.
        "puts_per_s": rate("requests_total", op="put") + rate("requests_total", op="commit"),
        "bytes_in_per_s": rate("bytes_in_total"),
        "bytes_out_per_s": rate("bytes_out_total"),
        "hits_of_unlimited": share_of(
            total(now, _NODE + "store_sampled_found_total"),
            total(now, _NODE + "store_sampled_unlimited_total"),
        ),
        "hits_total": int(total(now, _NODE + "hits_total")),
        "misses_total": int(total(now, _NODE + "misses_total")),
        # Of the disks below the memory; all 0 without an SSD tier.
        "ssd_capacity_bytes": int(total(now, _NODE + "ssd_capacity_bytes")),
        "ssd_used_bytes": int(total(now, _NODE + "ssd_block_bytes")),
        "ssd_block_count": int(total(now, _NODE + "ssd_blocks")),
        "ssd_reads_per_s": rate("ssd_reads_total"),
        # Of the directory that nodes share, all 0 without one; reads also of what other nodes wrote there.
        "shared_capacity_bytes": int(total(now, _NODE + "shared_capacity_bytes")),
        "shared_used_bytes": int(total(now, _NODE + "shared_block_bytes")),
        "shared_block_count": int(total(now, _NODE + "shared_blocks")),
        "shared_reads_per_s": rate("shared_reads_total") + rate("shared_other_reads_total"),
    }
