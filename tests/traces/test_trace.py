"""Cutting and stretching a trace keeps its requests."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest

from mooncache.traces import Trace, generate
from mooncache.traces.generator import conversation
from mooncache.traces.stats import hit_blocks, stats


@pytest.fixture(scope="module")
def trace() -> Trace:
    return generate(conversation(requests=500, tenants=3), random.Random(1))


def test_halves_are_the_whole(trace: Trace) -> None:
    early, late = trace.halves()
    assert len(early) + len(late) == len(trace)
    assert [*early.blocks(3), *late.blocks(0)] == [*trace.blocks(3), *trace.blocks(len(early))]
    assert late.arrival_s[0] >= 0
    assert late.tenant is not None
    assert len(late.tenant) == len(late)
    assert np.concatenate([early.input_tokens, late.input_tokens]).tolist() == trace.input_tokens.tolist()


def test_windows_count_from_their_beginning_and_may_be_empty(trace: Trace) -> None:
    cut = trace.window(30.0, 60.0)
    inside = (trace.arrival_s >= 30) & (trace.arrival_s < 60)
    assert len(cut) == inside.sum()
    assert cut.arrival_s.tolist() == pytest.approx((trace.arrival_s[inside] - 30).tolist())
    assert cut.offsets[-1] == len(cut.hash_ids)
    assert len(trace.window(60.0, 30.0)) == 0
    assert len(trace.first(0).halves()[0]) == 0


def test_speed_and_outputs(trace: Trace) -> None:
    assert trace.speed(2.0).span_s == pytest.approx(trace.span_s / 2)
    assert set(trace.with_outputs(7).output_tokens.tolist()) == {7}
    for factor in (0.0, -1.0, float("nan")):
        with pytest.raises(ValueError, match="factor above 0"):
            trace.speed(factor)


@pytest.mark.parametrize("rng", [None, random.Random(3)])
def test_spreading_stays_within_the_tick_and_in_order(trace: Trace, rng: random.Random | None) -> None:
    spread = trace.spread(3.0, rng)
    assert (np.diff(spread.arrival_s) >= 0).all()
    moved_s = spread.arrival_s - trace.arrival_s
    assert moved_s.min() >= 0
    assert moved_s.max() < 3.0
    assert stats(spread).requests_at_once_max == 1
    assert np.array_equal(spread.hash_ids, trace.hash_ids)


def test_times_that_differ_are_not_moved(trace: Trace) -> None:
    apart = replace(trace, arrival_s=np.arange(len(trace)) * 0.7)
    assert np.array_equal(apart.spread().arrival_s, apart.arrival_s)


def test_hits_are_the_longest_prefix_seen_before(trace: Trace) -> None:
    seen: set[int] = set()
    expected = []
    for row in range(len(trace)):
        blocks = trace.blocks(row)
        hit = next((depth for depth, block in enumerate(blocks) if block not in seen), len(blocks))
        expected.append(hit)
        seen.update(blocks)
    assert hit_blocks(trace).tolist() == expected
