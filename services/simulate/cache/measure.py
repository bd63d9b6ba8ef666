"""Hit ratios of eviction policies on a trace: one cache, prefix hits over all block references.

Idea: every request first counts its leading run in the cache, then uses its chain. The cache starts cold and
goes on into the second half of the trace (in time) warm; both halves and the whole are reported.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final, NamedTuple

from mooncache.simulate.cache import NodeCache, UseInfo, make
from mooncache.simulate.cache.base import UNLIMITED
from mooncache.simulate.cache.belady import Belady
from mooncache.traces import Trace

CAPACITIES_BLOCKS: Final = (1_000, 3_000, 10_000, 30_000, 50_000, 100_000, UNLIMITED)
ORACLE: Final = "belady"


class HitRatio(NamedTuple):
    """Blocks hit over blocks referenced; a half without requests counts 0."""

    policy: str
    capacity_blocks: int
    first_half: float
    second_half: float
    whole: float


def hit_ratios(
    trace: Trace, policies: Sequence[str], capacities: Sequence[int] = CAPACITIES_BLOCKS
) -> list[HitRatio]:
    """One row for each capacity and policy, in that order. `belady` is the oracle.

    Raises: InvalidArgument for a policy or capacity that `make` refuses.
    """
    chains = [trace.blocks(number) for number in range(len(trace))]
    return [row for capacity in capacities for row in _rows(trace, chains, policies, capacity)]


def _rows(
    trace: Trace, chains: list[list[int]], policies: Sequence[str], capacity: int
) -> Iterator[HitRatio]:
    for policy in policies:
        cache: NodeCache = Belady(capacity, chains) if policy == ORACLE else make(policy, capacity)
        first, second, whole = measure(trace, chains, cache)
        yield HitRatio(policy, capacity, first, second, whole)


def measure(trace: Trace, chains: Sequence[Sequence[int]], cache: NodeCache) -> tuple[float, float, float]:
    """Hit ratio of the first half in time, of the second and of the whole."""
    times_s: list[float] = trace.arrival_s.tolist()
    partial: list[bool] = (trace.input_tokens % trace.block_tokens != 0).tolist()
    middle_s = (times_s[0] + times_s[-1]) / 2 if times_s else 0.0
    hits, references = [0, 0], [0, 0]
    for chain, now_s, is_partial in zip(chains, times_s, partial, strict=True):
        half = 1 if now_s >= middle_s else 0
        hits[half] += cache.leading(chain, now_s)
        references[half] += len(chain)
        cache.use(chain, now_s, UseInfo(last_partial=is_partial))
    first, second = (hit / max(count, 1) for hit, count in zip(hits, references, strict=True))
    return first, second, sum(hits) / max(sum(references), 1)
