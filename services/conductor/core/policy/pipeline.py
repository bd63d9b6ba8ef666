"""Chunked pipelines: several instances compute one long prompt, chunk after chunk, layer group after layer group.

Source: Mooncake (FAST'25, section 3.2; chunked pipeline parallelism). With k stages a chunk takes a k-th of its
time on each stage, and chunk j begins on a stage when chunk j-1 has left it and j has left the stage before. All
stages need the same time for a chunk, which makes this a proportionate flow shop: whatever the chunks, the end is

    (sum of t_j + (k - 1) max t_j) / k

so no table over chunks and stages has to be filled. `seconds` is that formula; chunks at the end of a prompt cost
most, because they attend to all that comes before.
"""

from __future__ import annotations

from typing import NamedTuple

from mooncache.conductor.core.policy.types import PrefillCost

CHUNK_OVERHEAD_S = 0.004  # begin a chunk on a stage and pass its activations on
CHUNKS_TOKENS = (1024, 2048, 4096, 8192, 16384)


class PipelinePlan(NamedTuple):
    """How a prompt is computed together, and how long it takes."""

    stages: int
    chunk_tokens: int
    seconds: float


def seconds(cost: PrefillCost, n: int, p: int, stages: int, chunk_tokens: int) -> float:
    """The time of a prompt of n tokens, p of them cached, on so many stages."""
    if stages <= 1:
        return cost.seconds(n, p)
    p = max(0, min(p, n - 1))
    chunks = -(-(n - p) // chunk_tokens)
    total_s = cost.seconds(n, p) + chunks * stages * CHUNK_OVERHEAD_S
    # The dearest chunk is the last complete one, the rest behind it, or (loading the prefix) the first.
    longest_s = 0.0
    for begin in {p, p + (chunks - 1) * chunk_tokens, p + max(0, chunks - 2) * chunk_tokens}:
        end = min(begin + chunk_tokens, n)
        chunk_s = cost.b * (end - begin) + cost.c * (float(end) * end - float(begin) * begin)
        if begin == p:
            chunk_s += cost.a + cost.d * p
        longest_s = max(longest_s, chunk_s)
    return (total_s + (stages - 1) * (longest_s + stages * CHUNK_OVERHEAD_S)) / stages


def best(cost: PrefillCost, n: int, p: int, stages: int) -> PipelinePlan:
    """The best chunk for so many stages."""
    if stages <= 1:
        return PipelinePlan(1, n - p, cost.seconds(n, p))
    return min(
        (PipelinePlan(stages, chunk, seconds(cost, n, p, stages, chunk)) for chunk in CHUNKS_TOKENS),
        key=lambda plan: plan.seconds,
    )
