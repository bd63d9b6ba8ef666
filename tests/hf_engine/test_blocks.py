"""The block pool: counted references, a free list that is a cache, and an invariant after every step."""

from __future__ import annotations

import random

import pytest

from mooncache.hf_engine.core.blocks import BlockPool


def test_all_or_nothing() -> None:
    pool = BlockPool(3)
    assert pool.allocate(4) is None and pool.free_count == 3
    assert pool.allocate(3) == [0, 1, 2] and pool.allocate(1) is None


def test_a_free_block_is_found_until_it_is_handed_out() -> None:
    pool = BlockPool(2)
    one, two = pool.allocate(2) or []
    pool.publish(one, b"a")
    pool.publish(two, b"b")
    pool.release([two, one])
    assert pool.find([b"a", b"x", b"b"]) == [one], "a chain ends at its first gap"
    assert pool.allocate(1) == [two] and pool.find([b"b"]) == []
    pool.check()


def test_blocks_without_content_go_first_and_the_oldest_content_next() -> None:
    pool = BlockPool(3)
    blocks = pool.allocate(3) or []
    pool.publish(blocks[0], b"old")
    pool.publish(blocks[1], b"new")
    for block in blocks:
        pool.release([block])
    assert pool.allocate(3) == [blocks[2], blocks[0], blocks[1]]


def test_the_first_block_of_a_key_stays() -> None:
    pool = BlockPool(2)
    one, two = pool.allocate(2) or []
    pool.publish(one, b"k")
    pool.publish(two, b"k")
    assert pool.find([b"k"]) == [one]
    pool.check()


def test_releasing_too_often_is_a_defect() -> None:
    pool = BlockPool(1)
    with pytest.raises(AssertionError, match="more often"):
        pool.release([0])


@pytest.mark.parametrize("seed", range(20))
def test_random_histories(seed: int) -> None:
    source, pool, held = random.Random(seed), BlockPool(8), []
    for _ in range(500):
        step = source.randrange(4)
        if step == 0:
            held += pool.allocate(source.randint(1, 4)) or []
        elif step == 1 and held:
            pool.release([held.pop(source.randrange(len(held)))])
        elif step == 2 and held:
            pool.publish(source.choice(held), bytes([source.randrange(6)]))
        else:
            held += pool.find([bytes([source.randrange(6)]) for _ in range(3)])
        pool.check()
    pool.release(held)
    pool.check()
    assert pool.free_count == 8
