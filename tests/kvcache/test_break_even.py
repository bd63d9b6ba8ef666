"""Load or compute: what is not known is loaded, what does not pay is computed, a path that recovers is used again."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mooncache.kvcache.core import break_even as be

BLOCK_TOKENS, BLOCK_BYTES = 32, 1 << 20
TOKEN_S = 0.001  # of computing: 32 ms a block


def taught(byte_s: float = 0.0, fixed_s: float = 0.0, sizes: tuple[int, ...] = (10, 40, 20)) -> be.BreakEven:
    """An engine that computes a block in 32 ms, and has loaded so many blocks."""
    known = be.BreakEven(block_tokens=BLOCK_TOKENS, block_bytes=BLOCK_BYTES)
    for _ in range(be.STEPS_MIN):
        known.computed(512, 512 * TOKEN_S)
    for blocks in sizes:
        known.loaded(blocks, blocks, fixed_s + byte_s * blocks * BLOCK_BYTES)
    return known


def per_byte(block_s: float) -> float:
    return block_s / BLOCK_BYTES


def test_what_is_not_known_is_loaded() -> None:
    new = be.BreakEven(block_tokens=BLOCK_TOKENS, block_bytes=BLOCK_BYTES)
    assert new.blocks_to_load(100, 0.0) == 100
    assert new.pace(100) is None
    for _ in range(be.LOADS_MIN):
        new.loaded(10, 10, 100.0)
    assert new.blocks_to_load(10, 0.0) == 10, "how fast it computes is not known"
    known = taught(sizes=())
    assert known.blocks_to_load(10, 0.0) == 10, "how fast it loads is not known"
    slow = taught(per_byte(1.0), sizes=(1, 1, 1))
    assert slow.blocks_to_load(100, 0.0) == 100, "loads of one block say nothing of a hundred"


@pytest.mark.parametrize(
    ("block_s", "fixed_s", "blocks", "pays"),
    [
        (0.001, 0.0, 30, True),
        (0.030, 0.0, 30, True),
        (0.040, 0.0, 30, False),
        (0.320, 0.0, 30, False),
        (0.001, 0.5, 30, True),
        (0.001, 0.5, 10, False),  # the fixed part alone takes longer
        (0.0, 0.0335, 1, True),  # a difference that is no more than the margin
    ],
)
def test_what_pays(block_s: float, fixed_s: float, blocks: int, pays: bool) -> None:
    assert taught(per_byte(block_s), fixed_s).pays(blocks) is pays


def test_a_choice_holds_until_the_other_is_clearly_faster() -> None:
    known = taught(per_byte(0.040))
    assert not known.pays(30)
    for _ in range(40):
        known.loaded(30, 30, 30 * 0.030)
    assert not known.pays(30), "faster than computing, but not clearly"
    for _ in range(40):
        known.loaded(30, 30, 30 * 0.020)
    assert known.pays(30)
    for _ in range(40):
        known.loaded(30, 30, 30 * 0.030)
    assert known.pays(30)


def test_a_slow_path_is_tried_now_and_then_with_little() -> None:
    known = taught(per_byte(0.320))
    tried = {second: known.blocks_to_load(40, float(second)) for second in range(100, 112)}
    assert {second: blocks for second, blocks in tried.items() if blocks} == {100: 2, 105: 2, 110: 2}


def test_a_path_that_recovers_is_used_again() -> None:
    known = taught(per_byte(0.320))
    assert known.blocks_to_load(40, 100.0) == 2
    known.loaded(2, 2, 0.002)
    assert known.blocks_to_load(40, 100.1) == 40


def test_a_load_that_was_cut_counts_as_slow() -> None:
    known = taught(per_byte(0.001))
    for _ in range(be.LOADS_MIN):
        known.loaded(40, 0, 0.5)
    assert not known.pays(40)


def test_steps_that_did_other_work_do_not_count() -> None:
    known = taught()
    before = known.compute_s(10)
    for _ in range(20):
        known.computed(512, 512 * TOKEN_S)
        known.computed(512, 20.0)  # a step in which the machine was busy
        known.computed(4, 0.00001)  # the end of a prompt
    assert known.compute_s(10) == before == pytest.approx(0.32)


def test_a_load_has_to_keep_pace_with_computing() -> None:
    pace = taught(per_byte(0.001)).pace(100)
    assert pace is not None
    assert pace.block_s == pytest.approx(0.032)
    assert pace.grace_s == pytest.approx(be.GRACE_SHARE * 3.2)
    assert pace.due_s(10) - pace.due_s(0) == pytest.approx(0.32)
    slow = taught(per_byte(10.0)).pace(2)
    assert slow is not None and slow.grace_s == pytest.approx(0.064), "at most what computing takes"
    new = taught(sizes=()).pace(100)
    assert new is not None and new.grace_s == pytest.approx(3.2)


events = st.lists(
    st.one_of(
        st.tuples(st.just("computed"), st.integers(0, 10_000), st.floats(0, 100)),
        st.tuples(st.just("loaded"), st.integers(0, 10_000), st.floats(0, 100)),
        st.tuples(st.just("cut"), st.integers(0, 10_000), st.floats(0, 100)),
        st.tuples(st.just("ask"), st.integers(0, 10_000), st.floats(0, 100)),
    ),
    max_size=200,
)


@given(events)
def test_whatever_is_measured_estimates_are_sane(story: list[tuple[str, int, float]]) -> None:
    known = be.BreakEven(block_tokens=BLOCK_TOKENS, block_bytes=BLOCK_BYTES)
    for what, count, seconds in story:
        if what == "computed":
            known.computed(count, seconds)
        elif what == "loaded":
            known.loaded(count, count, seconds)
        elif what == "cut":
            known.loaded(count, count // 3, seconds)
        else:
            trial = max(1, int(count * be.TRIAL_SHARE))
            assert known.blocks_to_load(count, seconds) in {0, trial, count}
            assert all((value or 0.0) >= 0 for value in (known.compute_s(count), known.load_s(count)))
            pace = known.pace(count)
            assert pace is None or (pace.grace_s >= be.GRACE_MIN_S and pace.block_s >= 0)
