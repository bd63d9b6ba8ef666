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
    assert new.pace(100).block_s == pytest.approx(be.TOKEN_S_ASSUMED * BLOCK_TOKENS), "but not at any price"
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
    assert pace.block_s == pytest.approx(0.032)
    assert pace.grace_s == pytest.approx(be.GRACE_SHARE * 3.2)
    assert pace.due_s(10) - pace.due_s(0) == pytest.approx(0.32)
    slow = taught(per_byte(10.0))
    assert slow.pace(2).grace_s == be.GRACE_MIN_S
    assert slow.pace(100).grace_s == pytest.approx(be.GRACE_SHARE_MAX * 3.2), "however slow it is known to be"
    new = taught(sizes=())
    assert new.pace(100).grace_s == pytest.approx(be.GRACE_SHARE_MAX * 3.2)
    assert new.pace(10).grace_s == be.GRACE_UNKNOWN_S, "a first load also connects"
    trial = taught(per_byte(0.320)).pace(2, found=40)
    assert trial.grace_s == pytest.approx(be.GRACE_SHARE_MAX * 40 * 0.032), (
        "a part of what the request would take"
    )


def test_a_load_of_which_nothing_came_is_slower_than_computing() -> None:
    known = taught(per_byte(0.001))
    for _ in range(be.CUTS_MAX):
        assert known.pays(40), "once may be chance"
        known.loaded(40, 0, 0.03)
    assert not known.pays(40)
    assert known.weigh(40, 100.0).is_trial
    for second in range(101, 200):
        if known.weigh(40, float(second)).is_trial:
            known.loaded(2, 0, 0.03)
        assert not known.pays(40), "small trials do not make it a path of which nothing is known"


def test_a_path_that_was_never_measured_is_judged_by_its_cuts() -> None:
    known = taught(sizes=())
    for _ in range(be.CUTS_MAX):
        known.loaded(40, 0, 0.05)
    assert not known.pays(40)


def test_batches_are_as_large_as_they_may_be_late() -> None:
    pace = be.Pace(grace_s=0.1, block_s=0.032)
    assert pace.batch_blocks(4, 0, 0.0) == 4
    assert pace.batch_blocks(4, 4, 0.001) == 8, "on a fast path they double"
    assert pace.batch_blocks(32, 32, 32 * 0.016) == 19, "half of (0.1 + 32 * 0.016) / 0.016"
    assert pace.batch_blocks(32, 32, 32 * 0.031) == 2
    assert pace.batch_blocks(32, 32, 100.0) == 1, "and never less"


NEAR, FAR, DISK = ("near (dram)",), ("far (dram)",), ("near (ssd)",)


def test_each_path_is_judged_by_itself() -> None:
    known = taught(sizes=())
    for place, block_s in ((NEAR, 0.001), (FAR, 0.320), (DISK, 0.010)):
        for blocks in (10, 40, 20):
            known.loaded(blocks, blocks, block_s * blocks, [place] * blocks)
    assert known.pays(40, [NEAR] * 40) and known.pays(40, [DISK] * 40)
    assert not known.pays(40, [FAR] * 40)
    assert known.pays(40), "and one that is not known is tried"
    assert known.load_s(40, [NEAR] * 20 + [DISK] * 20) == pytest.approx(0.2), (
        "places are read at the same time"
    )
    weighed = known.weigh(40, 100.0, [FAR] * 40)
    assert (weighed.load, weighed.is_trial, weighed.place) == (2, True, "far (dram)")
    assert weighed.reason == (
        "38 of 40 blocks not loaded, 2 as a trial: all from far (dram) would take 12800 ms, computing 1280 ms"
    )
    assert known.weigh(40, 101.0, [FAR] * 40).load == 0


def test_blocks_before_the_first_slow_one_are_loaded() -> None:
    known = taught(sizes=())
    for place, block_s in ((NEAR, 0.001), (FAR, 0.320)):
        for blocks in (10, 40, 20):
            known.loaded(blocks, blocks, block_s * blocks, [place] * blocks)
    places = [NEAR] * 15 + [FAR] * 25
    assert known.weigh(40, 100.0, places).load == 17, "and a few as a trial"
    weighed = known.weigh(40, 101.0, places)
    assert (weighed.load, weighed.is_trial) == (15, False)
    one = [NEAR] * 15 + [FAR] + [NEAR] * 24
    assert known.weigh(40, 101.0, one).load == 40, "one block from far comes while the others do"


def test_a_cut_tells_of_the_path_of_the_block_that_did_not_come() -> None:
    known = taught(sizes=())
    places = [NEAR] * 15 + [FAR] * 25
    for _ in range(be.CUTS_MAX):
        known.loaded(40, 15, 0.6, places)
    known.weigh(40, 100.0, places)
    assert known.weigh(40, 101.0, places).load == 15
    assert known.pays(40, [NEAR] * 40)


def test_the_slowest_rank_decides() -> None:
    known = be.BreakEven(block_tokens=BLOCK_TOKENS, block_bytes=BLOCK_BYTES, shards=2)
    for _ in range(be.STEPS_MIN):
        known.computed(512, 512 * TOKEN_S)
    for blocks in (10, 40, 20):
        known.loaded(blocks, blocks, blocks * 0.001, shard=0)
        known.loaded(blocks, blocks, blocks * 0.320, shard=1)
    assert not known.pays(40)
    for _ in range(be.CUTS_MAX * 20):
        known.loaded(40, 40, 40 * 0.001, shard=1)
    assert known.pays(40)
    places = [("near (dram)", "far (dram)")] * 40
    known.loaded(40, 20, 0.6, places, shard=1)
    known.loaded(40, 0, 0.6, places, shard=1)
    assert not known.pays(40, places)
    assert known.pays(40, [("near (dram)", "near (dram)")] * 40)


def test_asking_may_cost_a_part_of_computing() -> None:
    known = taught()
    assert known.ask_s(1000) == pytest.approx(be.ASK_SHARE * 32)
    assert known.ask_s(1) == be.ASK_MIN_S
    assert taught().ask_s(10) < be.BreakEven(block_tokens=1, block_bytes=1).ask_s(10) == be.ASK_UNKNOWN_S


def test_a_cut_is_explained() -> None:
    assert be.cut_reason(12, 62, 0.1234, be.Pace(0.02, 0.01)) == (
        "cut after 12 of 62 blocks: the next did not come in 123 ms, due after 140 ms"
    )


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
            assert pace.grace_s >= be.GRACE_MIN_S and pace.block_s >= 0
            assert pace.grace_s <= max(
                be.GRACE_UNKNOWN_S, be.GRACE_SHARE_MAX * (known.compute_s(count) or 1e9)
            )
            assert known.ask_s(count) > 0
