"""Several groups of KV: up to which border the pool has a prefix, and what is loaded for it."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mooncache.connectors.vllm.core.groups import (
    FULL,
    STATE_WINDOW,
    BlockRange,
    Column,
    KvGroups,
    columns_of,
    described,
    groups_of,
)

pytestmark = pytest.mark.filterwarnings("ignore")  # vLLM's own
SIZE = 4
WINDOWS = st.lists(st.sampled_from([FULL, 1, 2, 4, 5, 6, 8, 9, 30]), min_size=1, max_size=4)


SIZES = st.lists(st.sampled_from([1, 2, 4, 6]), min_size=4, max_size=4)
"""Tokens of a block of each group."""


def grouped(windows: list[int], sizes: list[int]) -> KvGroups:
    """Groups of one size, or their columns."""
    sizes = sizes[: len(windows)]
    if len(set(sizes)) == 1:
        return KvGroups(sizes[0], tuple(windows))
    columns = columns_of(sizes)
    return KvGroups(math.lcm(*sizes), tuple(windows[column.group] for column in columns), (), columns)


def seen_by(window: int, token: int) -> range:
    """The tokens before `token` that it looks at."""
    return range(0 if window == FULL else max(0, token - window + 1), token)


def seen_blocks(groups: KvGroups, border: int) -> set[tuple[int, int]]:
    """(group, block) of all that the token behind the border looks at, token by token."""
    found = set()
    for group, window in enumerate(groups.windows):
        _, at, of = groups.column(group)
        for token in seen_by(window, border * groups.block_tokens):
            if token // (groups.block_tokens // of) % of == at:
                found.add((group, token // groups.block_tokens))
    return found


def brute_force(groups: KvGroups, present: list[list[int]], first: int, end: int) -> int:
    """The last border whose next token sees only tokens that the engine has or the pool has."""
    for border in range(end, first, -1):
        if all(
            block < first or (block < len(present[group]) and present[group][block])
            for group, block in seen_blocks(groups, border)
        ):
            return border
    return first


@given(windows=WINDOWS, sizes=SIZES, data=st.data())
def test_the_border_is_the_last_one_whose_next_token_sees_nothing_that_is_missing(
    windows: list[int], sizes: list[int], data: st.DataObject
) -> None:
    groups = grouped(windows, sizes)
    blocks = data.draw(st.integers(0, 14))
    # Mostly there, or borders would be rare.
    flags = st.lists(st.sampled_from([1, 1, 1, 1, 0]), min_size=blocks, max_size=blocks)
    present = [data.draw(flags) for _ in groups.windows]
    first, end = data.draw(st.integers(0, 14)), data.draw(st.integers(0, 16))
    found = groups.longest([bytearray(part) for part in present], first, end)
    known = min([end, blocks])
    assert found == brute_force(groups, present, first, max(first, known))
    for group, low, high in groups.needed(first, found):
        assert all(present[group][low:high])


@given(windows=WINDOWS, sizes=SIZES, first=st.integers(0, 9), more=st.integers(0, 9))
def test_what_is_loaded_is_what_the_next_token_sees_and_the_engine_does_not_have(
    windows: list[int], sizes: list[int], first: int, more: int
) -> None:
    groups = grouped(windows, sizes)
    loaded = {
        (part.group, block)
        for part in groups.needed(first, first + more)
        for block in range(part.first, part.end)
    }
    assert loaded == {(group, block) for group, block in seen_blocks(groups, first + more) if block >= first}


def test_a_group_with_shorter_blocks_has_columns() -> None:
    groups = grouped([8, FULL], [4, 2])
    assert groups.block_tokens == 4
    assert groups.columns == (Column(0), Column(1, 0, 2), Column(1, 1, 2))
    assert (groups.windows, groups.members, groups.lead) == ((8, FULL, FULL), (0, 1, 1), 1)
    assert groups.tables([[1, 2], [3, 4, 5, 6, 7]]) == [[1, 2], [3, 5, 7], [4, 6]]
    plain = grouped([8, FULL], [4, 4])
    assert plain.tables([[1], [2]]) == [[1], [2]]
    layers = [["a"], ["b"]]
    said = {described(group, layers, groups) for group in range(3)}
    assert len(said) == 3
    assert not said & {described(group, layers, plain) for group in range(2)}


def test_only_the_last_blocks_of_a_window_are_needed() -> None:
    groups = KvGroups(32, (128, FULL))
    assert groups.needed(0, 20) == [BlockRange(0, 16, 20), BlockRange(1, 0, 20)]
    assert groups.lead == 1
    assert not groups.is_plain
    # A window's worth in front of the border is there, and what lies before it is not.
    windowed, full = bytearray([0] * 16 + [1] * 4), bytearray([1] * 20)
    assert groups.longest([windowed, full], 0, 20) == 20
    assert groups.longest([windowed, full], 0, 19) == 0
    windowed[18] = 0
    assert groups.longest([windowed, full], 0, 20) == 0
    full[19] = 0
    windowed[12:18] = bytes([1] * 6)
    assert groups.longest([windowed, full], 0, 20) == 18


def test_one_group_of_full_attention_takes_any_leading_blocks() -> None:
    groups = KvGroups(SIZE)
    assert groups.is_plain
    assert groups.longest([bytearray([1, 1, 0, 1])], 0, 4) == 2
    assert groups.longest([bytearray([0, 1, 1])], 1, 9) == 3
    assert groups.longest([], 2, 9) == 2


@pytest.mark.parametrize("block_tokens", [16, 32, 48])
@pytest.mark.parametrize("window", [1, 2, 31, 32, 33, 128, 129, 1000])
def test_vllm_keeps_memory_for_the_same_blocks(block_tokens: int, window: int) -> None:
    pytest.importorskip("vllm", reason="vLLM is not installed (scripts/install_vllm.sh)")
    from vllm.v1.core.single_type_kv_cache_manager import SlidingWindowManager

    manager: Any = object.__new__(SlidingWindowManager)
    manager.sliding_window, manager.extra_retained_tokens = window, 0
    groups = KvGroups(block_tokens, (window,))
    for border in range(80):
        skipped = manager.get_num_skipped_tokens(border * block_tokens) // block_tokens
        assert groups.first_needed(0, border) == skipped


def test_windows_are_read_of_what_vllm_keeps_blocks_for() -> None:
    def spec(kind: str, **fields: Any) -> Any:
        return type(kind, (), fields)()

    sliding = spec("SlidingWindowSpec", block_size=32, sliding_window=128, extra_retained_tokens=3)
    everything = spec("FullAttentionSpec", block_size=32, sliding_window=128)
    groups = [SimpleNamespace(kv_cache_spec=part) for part in (sliding, everything)]
    assert groups_of(SimpleNamespace(kv_cache_groups=groups), 32) == KvGroups(32, (131, FULL))
    everything.block_size = 16
    assert groups_of(SimpleNamespace(kv_cache_groups=groups), 16) == KvGroups(
        32, (131, FULL, FULL), (), (Column(0), Column(1, 0, 2), Column(1, 1, 2))
    )


def test_a_state_is_the_block_in_front_of_the_border() -> None:
    groups = KvGroups(32, (FULL, STATE_WINDOW), ("", "state"))
    assert groups.needed(0, 20) == [BlockRange(0, 0, 20), BlockRange(1, 19, 20)]
    states = bytearray([0] * 20)
    states[3] = states[11] = 1
    assert groups.longest([bytearray([1] * 20), states], 0, 20) == 12
    assert groups.longest([bytearray([1] * 11 + [0] * 9), states], 0, 20) == 4
    assert groups.longest([bytearray([1] * 20), states], 12, 20) == 12
    # Only at the end of a prompt is it known that another engine stops.
    assert (groups.awaited(20, 20), groups.awaited(30, 20), groups.awaited(19, 20)) == (20, 20, 0)
    assert KvGroups(32, (FULL, 128)).awaited(19, 20) == 19


def test_what_a_state_is_made_of_is_in_the_passport() -> None:
    torch = pytest.importorskip("torch")

    def said(**fields: Any) -> str:
        known = {"mamba_type": "conv", "shapes": ((4, 2),), "dtypes": (torch.float32,), "block_size": 32}
        specs = [
            type("MambaSpec", (), {**known, **fields})(),
            type("FullAttentionSpec", (), {"block_size": 32})(),
        ]
        groups = groups_of(
            SimpleNamespace(kv_cache_groups=[SimpleNamespace(kv_cache_spec=spec) for spec in specs]), 32
        )
        assert groups.states[1] == ""
        return described(0, [["a"], ["b"]], groups)

    ways = [said(), said(shapes=((2, 4),)), said(dtypes=(torch.bfloat16,)), said(mamba_type="gated")]
    assert said() == ways[0]
    assert len(set(ways)) == 4
