"""What a trace is like, in the figures that papers print: rate, lengths, shared blocks, reuse gaps, best hit ratio."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from mooncache.traces.checks import compact

if TYPE_CHECKING:
    from collections.abc import Mapping

    from numpy.typing import NDArray

    from mooncache.traces.trace import Trace

_SHARES = (5, 25, 50, 75, 90, 95, 99)
# Exact quantiles of the gaps of a huge trace are not worth its memory.
_GAPS_MAX = 20_000_000


@dataclass(frozen=True, slots=True)
class TraceStats:
    """Figures of one trace. Hit figures are those of a cache that is empty at first and never evicts."""

    requests: int
    span_s: float
    rate_per_s: float
    requests_at_once_max: int
    block_tokens: int
    input_tokens: int
    output_tokens: int
    input_mean: float
    input_quantiles: Mapping[str, float]
    output_mean: float
    output_quantiles: Mapping[str, float]
    block_references: int
    blocks_unique: int
    blocks_mean: float
    blocks_most: int
    used_once_share: float
    first_blocks: int
    top_1_percent_share: float
    hit_ratio_blocks: float
    hit_ratio_tokens: float
    requests_without_hit_share: float
    reuse_gap_s: Mapping[str, float]
    tenants: int | None
    sessions: int | None


def stats(trace: Trace) -> TraceStats:
    """Figures of a trace that is not empty. Memory: about 40 bytes for each block reference."""
    count = len(trace)
    if not count:
        raise ValueError("an empty trace has no statistics")
    keys = compact(trace.hash_ids)
    counts = np.diff(trace.offsets)
    uses = np.bincount(keys)
    uses = np.sort(uses[uses > 0])
    hits = hit_blocks(trace)
    hit_tokens = np.minimum(hits * trace.block_tokens, trace.input_tokens)
    _, at_once = np.unique(trace.arrival_s, return_counts=True)
    top = max(1, len(uses) // 100)
    span_s = trace.span_s
    return TraceStats(
        requests=count,
        span_s=span_s,
        rate_per_s=count / span_s if span_s > 0 else 0.0,
        requests_at_once_max=int(at_once.max()),
        block_tokens=trace.block_tokens,
        input_tokens=int(trace.input_tokens.sum(dtype=np.int64)),
        output_tokens=int(trace.output_tokens.sum(dtype=np.int64)),
        input_mean=float(trace.input_tokens.mean()),
        input_quantiles=quantiles(trace.input_tokens),
        output_mean=float(trace.output_tokens.mean()),
        output_quantiles=quantiles(trace.output_tokens),
        block_references=len(keys),
        blocks_unique=len(uses),
        blocks_mean=float(counts.mean()),
        blocks_most=int(counts.max()),
        used_once_share=float((uses == 1).mean()),
        first_blocks=len(np.unique(trace.hash_ids[trace.offsets[:-1]])),
        top_1_percent_share=float(uses[-top:].sum() / len(keys)),
        hit_ratio_blocks=float(hits.sum() / len(keys)),
        hit_ratio_tokens=float(hit_tokens.sum() / trace.input_tokens.sum(dtype=np.int64)),
        requests_without_hit_share=float((hits == 0).mean()),
        reuse_gap_s=quantiles(_reuse_gaps_s(trace, keys)),
        tenants=None if trace.tenant is None else len(np.unique(trace.tenant)),
        sessions=None if trace.session is None else len(np.unique(trace.session)),
    )


def hit_blocks(trace: Trace) -> NDArray[np.int64]:
    """Leading blocks of each request that an earlier one had too: its hits in a cache that never evicts."""
    keys = compact(trace.hash_ids)
    if not len(keys):
        return np.zeros(len(trace), np.int64)
    first = np.zeros(int(keys.max()) + 1, np.int64)
    places = np.arange(len(keys))
    first[keys[::-1]] = places[::-1]
    seen = first[keys] < np.repeat(trace.offsets[:-1], np.diff(trace.offsets))
    totals = np.r_[0, np.cumsum(seen)]
    # An id has one predecessor, so seen blocks are the leading ones: their number is the length of the prefix.
    hits: NDArray[np.int64] = totals[trace.offsets[1:]] - totals[trace.offsets[:-1]]
    return hits


def quantiles(values: NDArray[np.floating] | NDArray[np.integer]) -> dict[str, float]:
    """p5 to p99 and the largest; empty for no values."""
    if not len(values):
        return {}
    shown = {
        f"p{share}": float(value)
        for share, value in zip(_SHARES, np.percentile(values, _SHARES), strict=True)
    }
    return {**shown, "max": float(values.max())}


def _reuse_gaps_s(trace: Trace, keys: NDArray[np.int64]) -> NDArray[np.float64]:
    """Times between two uses of one block; without blocks that one request in ten has (system prompts)."""
    if len(keys) > _GAPS_MAX:
        trace = trace.first(int(np.searchsorted(trace.offsets, _GAPS_MAX)) - 1)
        keys = keys[: len(trace.hash_ids)]
    often = np.bincount(keys) > max(10, len(trace) // 10)
    order = np.argsort(keys, kind="stable")
    sorted_keys = keys[order]
    same = (sorted_keys[1:] == sorted_keys[:-1]) & ~often[sorted_keys[1:]]
    gaps_s: NDArray[np.float64] = np.diff(np.repeat(trace.arrival_s, np.diff(trace.offsets))[order])[same]
    return gaps_s
