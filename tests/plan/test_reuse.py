"""Stack distances against an LRU cache that is played block by block."""

from __future__ import annotations

import os
from collections import OrderedDict
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mooncache.plan.core import reuse
from mooncache.plan.workload import demand_of
from mooncache.traces import read

# Read here: tests run without the environment's settings.
TRACE = Path(
    os.environ.get("MOONCACHE_TRACE")
    or Path(__file__).resolve().parents[2].parent / "shared" / "traces" / "conversation_trace.jsonl"
)
prompts = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=6), min_size=1, max_size=25)


def as_tree(paths: list[list[int]]) -> list[list[int]]:
    """Paths as block ids: equal ids mean equal prefixes."""
    ids: dict[tuple[int, ...], int] = {}
    return [
        [ids.setdefault(tuple(path[: depth + 1]), len(ids)) for depth in range(len(path))] for path in paths
    ]


def measured(chains: list[list[int]], block_tokens: int = 4) -> reuse.ReuseDistances:
    offsets = np.cumsum([0, *(len(chain) for chain in chains)])
    tokens = np.array([len(chain) * block_tokens for chain in chains])
    return reuse.measure(
        np.array([block for chain in chains for block in chain]), offsets, tokens, block_tokens
    )


def played(chains: list[list[int]], capacity: int) -> list[int]:
    """Leading hits of each prompt in an LRU cache that takes a prompt's last block first."""
    cache: OrderedDict[int, None] = OrderedDict()
    hits = []
    for chain in chains:
        leading = 0
        while leading < len(chain) and chain[leading] in cache:
            leading += 1
        hits.append(leading)
        for block in reversed(chain):
            cache.pop(block, None)
            cache[block] = None
        while len(cache) > capacity:
            cache.popitem(last=False)
    return hits


@given(prompts, st.integers(1, 40))
def test_hits_are_those_of_an_lru_cache(paths: list[list[int]], capacity: int) -> None:
    chains = as_tree(paths)
    got = measured(chains).cached_tokens(capacity)
    full = [4 * hits for hits in played(chains, capacity)]
    assert got.tolist() == [
        min(tokens, 4 * len(chain) - 1) for tokens, chain in zip(full, chains, strict=True)
    ]


@given(prompts, st.integers(0, 40), st.integers(0, 40))
def test_a_larger_cache_has_no_less_of_any_prompt(paths: list[list[int]], one: int, other: int) -> None:
    table = measured(as_tree(paths))
    assert (table.cached_tokens(min(one, other)) <= table.cached_tokens(max(one, other))).all()


@given(st.lists(st.integers(-50, 50), unique=True, max_size=60))
def test_counts_of_larger_before(values: list[int]) -> None:
    got = reuse.counts_of_larger_before(np.array(values, dtype=np.int64))
    assert got.tolist() == [
        sum(earlier > value for earlier in values[:at]) for at, value in enumerate(values)
    ]


def test_nothing_is_cached_for_the_first_prompt_and_nothing_without_a_cache() -> None:
    table = measured([[0, 1, 2], [0, 1, 3]])
    assert table.cached_tokens(100).tolist() == [0, 8]
    assert table.cached_tokens(0).tolist() == [0, 0]


def test_published_hit_ratios_of_the_conversation_trace() -> None:
    if not TRACE.is_file():
        pytest.skip("the public trace is not here")
    trace = read(TRACE)
    table = demand_of(trace).reuse
    for blocks, published in (
        (1_000, 0.045),
        (10_000, 0.212),
        (30_000, 0.326),
        (50_000, 0.355),
        (100_000, 0.364),
    ):
        assert np.mean(table.needed <= blocks) == pytest.approx(published, abs=0.001)
