"""Eviction by learnt reuse: what it keeps, what it gives up, and that it is no worse than LRU on made-up traffic."""

from __future__ import annotations

import os
import random
from pathlib import Path
from typing import NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mooncache.errors import InvalidArgument
from mooncache.simulate.cache import UseInfo, make
from mooncache.simulate.cache.hazard import BANDS, LEFT, PARTIAL, Hazard, Signals, class_of
from mooncache.simulate.cache.measure import HitRatio, hit_ratios
from mooncache.simulate.cache.reuse import Reuse
from mooncache.traces import generate, read
from mooncache.traces.generator import conversation, single_turn, tool_agent

ROOT = Path(__file__).resolve().parents[3]
PARTLY = UseInfo(last_partial=True)


def public_trace() -> Path | None:
    named = os.environ.get("MOONCACHE_TEST_TRACE") or os.environ.get("MOONCACHE_TRACE")
    path = Path(named) if named else ROOT.parent / "shared" / "traces" / "conversation_trace.jsonl"
    return path if path.is_file() else None


def test_partly_filled_blocks_go_first() -> None:
    cache = make("mooncache", 6, start_uses=0)
    cache.use([1, 2, 3], 0.0, PARTLY)
    cache.use([4, 5, 6], 1.0, PARTLY)
    assert cache.use([7, 8], 100.0) == [3, 6]


def test_what_a_session_left_behind_goes_before_older_chains() -> None:
    cache = make("mooncache", 12, start_uses=0)
    cache.use([1, 2, 3], 0.0)
    cache.use([11, 12, 13, 14, 15, 16], 1.0)
    cache.use([11, 12, 21], 60.0)  # its history was cut: 13 to 16 will not be asked for again
    assert cache.use([31, 32, 33], 61.0) == [16]


def test_a_session_of_many_turns_outlives_newcomers() -> None:
    cache = make("mooncache", 60, start_uses=0)
    chain = [1, 2, 3, 4]
    for turn in range(6):
        cache.use(chain, 40.0 * turn)
        chain = [*chain, 10 * turn + 100]
    for number in range(40):
        cache.use([1_000 + 10 * number + at for at in range(8)], 205.0 + number)
    assert cache.leading(chain, 250.0) == len(chain) - 1


def test_a_prompt_that_sessions_share_is_kept_while_their_own_blocks_go() -> None:
    cache, prompt = make("mooncache", 30, start_uses=0), list(range(5))
    rng = random.Random(3)
    for number in range(300):
        own = [1_000 + 20 * number + at for at in range(rng.randint(3, 9))]
        cache.use([*prompt, *own], 5.0 * number)
        if number % 4 == 0:
            cache.use([*prompt, *own, 1_000 + 20 * number + 19], 5.0 * number + 1.0)
        if number > 20:
            assert cache.leading(prompt, 5.0 * number + 2.0) == len(prompt)


def test_sessions_are_known_after_their_blocks_left() -> None:
    """A session that comes back after its eviction is in its second turn: same class as one that stayed."""
    small, large = make("mooncache", 8, start_uses=0), make("mooncache", 1_000, start_uses=0)
    for cache in (small, large):
        cache.use([1, 2, 3, 4], 0.0)
        for number in range(10):
            cache.use([100 + 10 * number + at for at in range(6)], 1_000.0 + number)
    assert 1 not in small
    classes = []
    for cache in (small, large):
        cache.use([1, 2, 3, 4, 5], 1_050.0)
        classes.append(cache._remembered[5].klass)  # type: ignore[attr-defined]
    assert classes[0] == classes[1]


def test_memory_is_bounded() -> None:
    cache = make("mooncache", 50, chains_max=100)
    for number in range(3_000):
        cache.use([5 * number + at for at in range(5)], 0.1 * number, PARTLY)
    assert len(cache) == 50
    assert len(cache._remembered) <= 100  # type: ignore[attr-defined]
    assert len(cache._heap) < 4_000  # type: ignore[attr-defined]


def test_age_decides_until_something_was_learnt() -> None:
    cache = make("mooncache", 6)
    cache.use([1, 2, 3], 0.0, PARTLY)
    cache.use([4, 5, 6], 1.0, PARTLY)
    assert sorted(cache.use([7, 8], 100.0)) == [2, 3]  # the end of the oldest chain, partly filled or not


class Store(NamedTuple):
    """A store node that asks the policy block by block."""

    policy: Reuse
    capacity_blocks: int
    blocks: set[int]

    def request(self, chain: list[int], placed: list[int], now_s: float) -> None:
        self.policy.seen(chain, now_s, here=self.blocks)
        for block in placed:
            if block in self.blocks:
                continue
            if len(self.blocks) == self.capacity_blocks:
                victim = self.policy.victim(now_s, block)
                assert victim is not None
                assert victim.block in self.blocks  # nothing else can go
                self.policy.discard(victim.block)
                self.blocks.remove(victim.block)
            if self.policy.stored(block, now_s):  # not when it made room for a block before it just now
                self.blocks.add(block)


def test_a_chain_that_is_stored_does_not_evict_itself() -> None:
    node = Store(Reuse(6, start_uses=0), 6, set())
    node.request([1, 2, 3], [1, 2, 3], 0.0)
    node.request([1, 2, 3, 4], [1, 2, 3, 4], 60.0)
    node.request([11, 12, 13], [11, 12, 13], 61.0)  # a newcomer is worth less, but it is being stored
    assert node.blocks >= {11, 12, 13}
    node.request([21, 22], [21, 22], 62.0)  # now the newcomer's end goes first
    assert node.blocks >= {1, 2, 3, 21, 22}


def test_blocks_of_no_known_chain_become_known_when_they_are_asked_for() -> None:
    policy = Reuse(10)
    assert not policy.stored(5, 0.0)
    assert policy.victim(0.0) is None
    policy.seen([4, 5], 1.0, here={5})
    victim = policy.victim(2.0)
    assert victim is not None
    assert victim.block == 5


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 12), st.integers(1, 9), st.integers(0, 3)), max_size=80),
    st.integers(1, 8),
    st.sampled_from((0, 20)),
)
def test_a_node_of_several_always_finds_a_victim_that_it_holds(
    requests: list[tuple[int, int, int]], capacity: int, start_uses: int
) -> None:
    node, now_s = Store(Reuse(capacity, chains_max=8, start_uses=start_uses), capacity, set()), 0.0
    for session, length, pause in requests:
        now_s += (0.5, 7.0, 45.0, 900.0)[pause]
        chain = [0, *(100 * session + at for at in range(1, length))]
        node.request(chain, [block for block in chain if block % 3 != 1], now_s)
        assert len(node.policy) == len(node.blocks) <= capacity
        assert all(block in node.policy for block in node.blocks)


def test_a_class_is_worth_more_after_its_reuses_were_seen() -> None:
    hazard = Hazard()
    seen, other = class_of(Signals(2, 50.0, 20, 5)), class_of(Signals(1, 0.0, 20, 20))
    before = hazard.worth_of(seen, 30.0), hazard.worth_of(other, 30.0)
    for _ in range(500):
        hazard.reused(seen, 4, 3.0)
        hazard.waited(other, 4, 13.0)
    hazard.refresh()
    after = hazard.worth_of(seen, 30.0), hazard.worth_of(other, 30.0)
    assert after[0] / after[1] > 2 * before[0] / before[1]


def test_worths_are_positive_and_continuous_in_age() -> None:
    hazard = Hazard()
    for klass in (0, 100, LEFT, PARTIAL):
        assert len(hazard.worth[klass]) == BANDS
        for begin_s in (8.0, 40.0, 692.0, 2335.0):
            below, at = hazard.worth_of(klass, begin_s - 1e-9), hazard.worth_of(klass, begin_s)
            assert at > 0.0
            assert below == pytest.approx(at)


@pytest.mark.parametrize(
    ("options", "slack"),
    [
        (conversation(requests=2_500), 0.002),
        (tool_agent(requests=2_500), 0.001),
        (single_turn(requests=1_500), 0.001),
        # Answers much quicker, or more of them, than the prior expects.
        (conversation(requests=2_500, tick_s=0.0, pause_median_s=30.0), 0.002),
        (conversation(requests=2_500, tick_s=0.0, pause_median_s=10.0), 0.002),
        # The one known kind where worths lose for some time; longer runs are above LRU again.
        (conversation(requests=2_500, return_first=0.8, return_later=0.8), 0.02),
    ],
    ids=["conversation", "tool-agent", "single-turn", "answers-in-30-s", "answers-in-10-s", "most-go-on"],
)
def test_no_worse_than_lru_on_made_up_traffic(options: object, slack: float) -> None:
    trace = generate(options, random.Random(11))  # type: ignore[arg-type]
    rows = hit_ratios(trace, ("lru", "mooncache", "belady"), (1_000, 5_000, 1 << 40))
    for lru, ours, oracle in zip(rows[::3], rows[1::3], rows[2::3], strict=True):
        assert ours.whole >= lru.whole - slack, (lru, ours)
        assert oracle.whole >= ours.whole


def test_halves_are_halves_in_time() -> None:
    trace = generate(conversation(requests=400), random.Random(1))
    (row,) = hit_ratios(trace, ("lru",), (1 << 40,))
    assert isinstance(row, HitRatio)
    assert min(row.first_half, row.second_half) < row.whole < max(row.first_half, row.second_half)
    with pytest.raises(InvalidArgument):
        hit_ratios(trace, ("nonsense",), (10,))


@pytest.mark.skipif(
    public_trace() is None, reason="needs the public conversation trace: set MOONCACHE_TEST_TRACE"
)
def test_public_conversation_trace() -> None:
    path = public_trace()
    assert path is not None
    lru, ours = hit_ratios(read(path), ("lru", "mooncache"), (10_000,))
    assert lru.whole == pytest.approx(0.212, abs=0.001)
    assert ours.whole >= 0.245
    assert ours.second_half > 0.255  # of which nothing was tuned
