"""Eviction policies: what holds for all of them, what each one is for, and the oracle as the upper bound."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mooncache.errors import InvalidArgument
from mooncache.simulate.cache import NAMES, UNLIMITED, NodeCache, UseInfo, make
from mooncache.simulate.cache.belady import Belady

OPTIONS = {"ttl": {"ttl_s": 50.0}}


def cache_of(name: str, capacity_blocks: int) -> NodeCache:
    return make(name, capacity_blocks, **OPTIONS.get(name, {}))


def sessions(seed: int, requests: int) -> list[tuple[float, list[int], bool]]:
    """(time, chain, last block is partial): sessions that share a root, go on, fork or end."""
    rng = random.Random(seed)
    fresh = iter(range(1, 1 << 40))
    open_chains: list[list[int]] = []
    uses, now_s = [], 0.0
    for _ in range(requests):
        now_s += rng.choice((0.0, 1.0, 9.0, 40.0))
        if open_chains and rng.random() < 0.5:
            chain = open_chains.pop(rng.randrange(len(open_chains)))
            chain = chain[: rng.randint(1, len(chain))] if rng.random() < 0.2 else chain
        else:
            chain = [0]
        chain = chain + [next(fresh) for _ in range(rng.randint(0, 6))]
        partial = rng.random() < 0.8
        uses.append((now_s, chain, partial))
        open_chains.append(chain[:-1] if partial and len(chain) > 1 else chain)
        del open_chains[:-12]
    return uses


def hits(cache: NodeCache, uses: Sequence[tuple[float, list[int], bool]]) -> int:
    total = 0
    for now_s, chain, partial in uses:
        total += cache.leading(chain, now_s)
        cache.use(chain, now_s, UseInfo(last_partial=partial))
    return total


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=25)
@given(seed=st.integers(0, 1 << 32), capacity=st.sampled_from((0, 1, 2, 7, 30, 200, UNLIMITED)))
def test_contents_are_what_came_less_what_left(name: str, seed: int, capacity: int) -> None:
    cache, held, rng = cache_of(name, capacity), set[int](), random.Random(seed)
    for now_s, chain, partial in sessions(seed, 60):
        before = set(held)
        gone = cache.use(chain, now_s, UseInfo(last_partial=partial))
        assert len(gone) == len(set(gone))
        assert set(gone) <= before
        held = {block for block in before | set(chain) if block in cache}
        assert before - held == set(gone)
        assert len(cache) == len(held) <= capacity
        if held and rng.random() < 0.2:
            lost = min(held)
            cache.discard(lost)
            cache.discard(lost)
            held.remove(lost)
            assert lost not in cache
            assert len(cache) == len(held)


@pytest.mark.parametrize("name", NAMES)
def test_same_uses_same_answers(name: str) -> None:
    uses = sessions(5, 400)
    one, other = cache_of(name, 60), cache_of(name, 60)
    for now_s, chain, partial in uses:
        info = UseInfo(last_partial=partial)
        assert one.use(chain, now_s, info) == other.use(chain, now_s, info)


@pytest.mark.parametrize("name", [name for name in NAMES if name != "ttl"])
def test_nothing_leaves_while_there_is_room(name: str) -> None:
    cache = cache_of(name, UNLIMITED)
    for now_s, chain, partial in sessions(6, 300):
        assert cache.use(chain, now_s, UseInfo(last_partial=partial)) == []
        assert cache.leading(chain, now_s) == len(chain)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("capacity", [5, 40, 150])
def test_nothing_beats_the_oracle(name: str, capacity: int) -> None:
    uses = sessions(7, 500)
    oracle = Belady(capacity, [chain for _, chain, _ in uses])
    assert hits(cache_of(name, capacity), uses) <= hits(oracle, uses)


def test_lru_evicts_the_longest_unused_from_its_end() -> None:
    cache = make("lru", 4)
    cache.use([1, 2, 3], 0.0)
    assert cache.use([1, 9, 8], 1.0) == [3]
    assert cache.use([7], 2.0) == [2]


def test_fifo_does_not_care_about_uses() -> None:
    cache = make("fifo", 2)
    cache.use([1], 0.0)
    cache.use([2], 1.0)
    cache.use([1], 2.0)
    assert cache.use([3], 3.0) == [1]


def test_ttl_forgets_what_was_not_used_for_its_time() -> None:
    cache = make("ttl", 10, ttl_s=5.0)
    cache.use([1, 2], 0.0)
    cache.use([1], 4.0)
    assert cache.leading([1, 2], 4.0) == 2
    assert cache.leading([1, 2], 6.0) == 1
    assert cache.use([3], 6.0) == [2]


def test_lfu_keeps_what_is_used_often() -> None:
    cache = make("lfu", 2)
    for block in (1, 1, 2):
        cache.use([block], 0.0)
    assert cache.use([3], 0.0) == [2]
    assert cache.use([2], 0.0) == [3]  # its use before the eviction is forgotten: it will be the next to go
    assert cache.use([3], 0.0) == [2]


def test_lfu_with_history_counts_on_after_an_eviction() -> None:
    plain, remembering = make("lfu", 2), make("lfu_history", 2)
    for cache in (plain, remembering):
        for block in (1, 1, 2, 3, 2):
            cache.use([block], 0.0)
    assert plain.use([3], 0.0) == [2]
    assert remembering.use([3], 0.0) == [1]  # as many uses as block 2, longer ago


def test_length_aware_gives_up_late_blocks_first() -> None:
    cache = make("length_aware", 3)
    cache.use([1, 2, 3], 0.0)
    assert cache.use([7], 1.0) == [3]


def test_two_queues_protect_what_was_used_twice_from_a_flood() -> None:
    cache = make("2q", 10)
    cache.use([1, 2], 0.0)
    cache.use([1, 2], 10.0)
    for block in range(100, 150):
        cache.use([block], 20.0)
    assert 1 in cache
    assert 2 in cache


def test_two_queues_take_what_follows_at_once_for_the_same_use() -> None:
    cache = make("2q", 4)
    cache.use([1, 2], 0.0)
    cache.use([1, 2], 1.0)
    for block in range(100, 110):
        cache.use([block], 20.0)
    assert 1 not in cache


def test_s3fifo_keeps_a_hot_block_through_a_scan() -> None:
    cache = make("s3fifo", 20)
    for _ in range(3):
        cache.use([1], 0.0)
    for block in range(100, 200):
        cache.use([block], 1.0)
    assert 1 in cache


@pytest.mark.parametrize("name", ["nonsense", "belady", ""])
def test_unknown_policies_are_refused(name: str) -> None:
    with pytest.raises(InvalidArgument, match="unknown: choose one of lru"):
        make(name, 10)


def test_wrong_options_and_capacities_are_refused() -> None:
    with pytest.raises(InvalidArgument, match="options"):
        make("lru", 10, ttl_s=3.0)
    with pytest.raises(InvalidArgument, match="negative"):
        make("lru", -1)
