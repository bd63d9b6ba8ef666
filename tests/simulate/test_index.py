"""The block index against sets, one per row."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from mooncache.simulate.index import BlockHolders, rows_of


def naive(held: list[set[int]], chain: list[int]) -> list[int]:
    counts = []
    for blocks in held:
        depth = 0
        while depth < len(chain) and chain[depth] in blocks:
            depth += 1
        counts.append(depth)
    return counts


CHANGES = st.lists(st.tuples(st.integers(0, 69), st.integers(0, 11), st.booleans()), max_size=400)


@settings(max_examples=100, deadline=None)
@given(CHANGES, st.integers(0, 12), st.booleans())
def test_leading_runs_equal_sets(changes: list[tuple[int, int, bool]], length: int, shared: bool) -> None:
    index = BlockHolders()
    held: list[set[int]] = [set() for _ in range(70)]
    if shared:  # many rows hold the beginning
        changes = [*((row, block, True) for row in range(70) for block in range(2)), *changes]
    for row, block, add in changes:
        if add:
            index.add([block], row)
            held[row].add(block)
        else:
            index.remove([block, 999], row)
            held[row].discard(block)
    chain = list(range(length))
    counts, depth, mask = index.leading(chain, 70)
    expected = naive(held, chain)
    assert counts.tolist() == expected
    tokens, _, _ = index.leading(chain, 70, 512, 512 * length - 5)
    assert tokens.tolist() == [min(512 * count, 512 * length - 5) if count else 0 for count in expected]
    assert depth == max(expected)
    assert rows_of(mask) == [row for row, count in enumerate(expected) if count == depth > 0]
    for row in (0, 3, 69):
        assert index.leading_on(chain, row, 0) == expected[row]
        assert index.leading_on(chain, row, expected[row]) == expected[row]
    assert len(index) == len(set().union(*held))


def test_a_row_that_is_gone_holds_nothing() -> None:
    index = BlockHolders()
    for block in range(20):
        index.add([block], block % 2)
        index.add([block], 2)
    assert index.forget_row(2) == 20
    assert index.forget_row(0) == 10
    assert [index.holders(block) for block in (0, 1)] == [0, 2]
    assert len(index) == 10
    assert np.array_equal(index.leading([1, 3], 3)[0], [0, 2, 0])
