"""The decode batch by segments equals a batch that is stepped one iteration at a time."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from mooncache.conductor.core.policy.types import DecodeCost
from mooncache.simulate.decode import Batch, worst_gaps_mean
from mooncache.simulate.sim_request import SimSequence

COST = DecodeCost(0.02, 0.001, 1e-6)


@dataclass
class Naive:
    """One sequence of the batch that makes every step."""

    kv_tokens: int
    steps: int
    gaps: list[float] = field(default_factory=list)


def stepped(arrivals: list[tuple[float, int, int]], capacity: float, most: int) -> list[list[float]]:
    """Gaps of each sequence (arrival s, prompt tokens, steps), made one step at a time.

    No sequence comes just as a step ends: which step it joins is then a matter of rounding.
    """
    sequences = [Naive(tokens, steps) for _, tokens, steps in arrivals]
    coming = list(range(len(arrivals)))
    waiting: list[int] = []
    running: list[int] = []
    now_s = 0.0
    while coming or waiting or running:
        while coming and arrivals[coming[0]][0] <= now_s:
            waiting.append(coming.pop(0))
        while waiting and len(running) < most:
            reserved = sum(arrivals[at][1] + arrivals[at][2] for at in (*running, waiting[0]))
            if reserved > capacity:
                break
            running.append(waiting.pop(0))
        if not running:
            now_s = arrivals[coming[0]][0]
            continue
        step_s = COST.tbt_s(len(running), sum(sequences[at].kv_tokens for at in running))
        now_s += step_s
        assume(all(abs(arrival_s - now_s) > 1e-9 for arrival_s, _, _ in arrivals))
        for at in list(running):
            sequences[at].gaps.append(step_s)
            sequences[at].kv_tokens += 1
            if len(sequences[at].gaps) == sequences[at].steps:
                running.remove(at)
    return [sequence.gaps for sequence in sequences]


def segmented(arrivals: list[tuple[float, int, int]], capacity: float, most: int) -> list[list[float]]:
    """The same through `Batch`, which is looked at only where something changes."""
    batch = Batch(COST, capacity, most)
    gaps: list[list[float]] = [[] for _ in arrivals]
    at, now_s = 0, 0.0
    while at < len(arrivals) or batch.running or batch.waiting:
        leave_s = batch.next_leave_s()
        arrival_s = arrivals[at][0] if at < len(arrivals) else math.inf
        if arrival_s <= leave_s:
            _, tokens, steps = arrivals[at]
            batch.waiting.append(SimSequence(at, tokens, steps))
            at += 1
            now_s = batch.boundary_s(arrival_s)
            # whoever else comes within this step joins with it
            while at < len(arrivals) and arrivals[at][0] <= now_s:
                batch.waiting.append(SimSequence(at, arrivals[at][1], arrivals[at][2]))
                at += 1
        else:
            now_s = leave_s
        for ended in batch.advance(now_s):
            gaps[ended.request] = batch.gaps(ended).tolist()
        while batch.waiting and batch.fits(batch.waiting[0]):
            sequence = batch.waiting.popleft()
            batch.join(sequence, sequence.request, now_s)
        assert batch.reserved_tokens <= capacity
        assert len(batch.running) <= most
        batch.begin()
    assert batch.kv_tokens == batch.reserved_tokens == 0
    return gaps


ARRIVALS = st.lists(
    st.tuples(st.floats(0, 3), st.integers(1, 3000), st.integers(1, 60)), min_size=1, max_size=25
).map(sorted)


@settings(max_examples=120, deadline=None)
@given(ARRIVALS, st.sampled_from([4000.0, 9000.0, math.inf]), st.sampled_from([1, 3, 100]))
def test_segments_equal_steps(arrivals: list[tuple[float, int, int]], capacity: float, most: int) -> None:
    expected, found = stepped(arrivals, capacity, most), segmented(arrivals, capacity, most)
    assert [len(gaps) for gaps in found] == [steps for _, _, steps in arrivals]
    for one, other in zip(found, expected, strict=True):
        assert one == pytest.approx(other, rel=1e-9)


def test_a_prompt_inside_the_batch_is_a_gap_of_everybody() -> None:
    batch = Batch(COST, math.inf, math.inf)
    first, second = SimSequence("a", 100, 10), SimSequence("b", 50, 4)
    batch.join(first, 1, 0.0)
    batch.begin()
    at_s = batch.boundary_s(0.07)
    batch.advance(at_s)
    batch.stall(1.5)
    batch.join(second, 2, at_s + 1.5)
    batch.begin()
    assert batch.advance(batch.next_leave_s()) == [second]
    assert batch.gaps(second).max() > 1.5  # it was computed before this step
    batch.begin()
    assert batch.advance(batch.next_leave_s()) == [first]
    gaps = batch.gaps(first)
    assert len(gaps) == 10
    assert np.count_nonzero(gaps > 1.5) == 1


def test_steps_until_is_the_first_boundary_not_before() -> None:
    batch = Batch(COST, math.inf, math.inf)
    batch.join(SimSequence("a", 1000, 500), 1, 0.0)
    batch.begin()
    for steps in (0, 1, 2, 17, 499):
        seconds = batch._after(steps)
        assert batch.steps_until(seconds) == steps
        assert batch.steps_until(seconds + 1e-6) == steps + 1


def test_dropped_sequence_gives_its_room_back() -> None:
    batch = Batch(COST, 5000, 10)
    batch.join(SimSequence("a", 1000, 50), 1, 0.0)
    batch.join(SimSequence("b", 2000, 30), 2, 0.0)
    batch.begin()
    batch.advance(batch.boundary_s(0.2))
    assert batch.drop(1) is not None
    assert batch.drop(1) is None
    batch.begin()
    assert [sequence.request for sequence in batch.advance(batch.next_leave_s())] == ["b"]
    assert batch.kv_tokens == batch.reserved_tokens == 0


def test_long_batches_forget_old_steps() -> None:
    batch = Batch(COST, math.inf, math.inf)
    now_s = 0.0
    for number in range(300):
        batch.join(SimSequence(number, 10, 40), number, now_s)
        batch.begin()
        now_s = batch.next_leave_s()
        (ended,) = batch.advance(now_s)
        assert len(batch.gaps(ended)) == 40
    assert len(batch._gaps) < 2000


def test_worst_tenth() -> None:
    gaps = np.array([0.1] * 18 + [0.5, 0.7])
    assert worst_gaps_mean(gaps, 0.0) == (pytest.approx(0.6), pytest.approx((1.8 + 1.2) / 20))
    assert worst_gaps_mean(gaps, 1.0)[0] == pytest.approx((1.1 + 0.7) / 2)
    assert worst_gaps_mean(gaps[:1], 0.0) == (pytest.approx(0.1), pytest.approx(0.1))
    assert worst_gaps_mean(gaps[:0], 0.0) == (0.0, 0.0)
