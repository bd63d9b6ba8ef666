"""The rate of fetching is learned for each store node; where little is known of one, its way's rate counts."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mooncache.client.results import BlockCopy, BlockTier
from mooncache.conductor.core.decisions import Decision, PoolAnswer, PoolState, SchedulingRequest
from mooncache.conductor.core.holder_rates import (
    FORGOTTEN_AFTER_S,
    HOLDERS_MAX,
    TRUSTED,
    BlockHolder,
    HolderRates,
    holder_of,
)
from mooncache.conductor.core.placed import RUNS_MAX, PlacedRun, at_holders, holders_of, runs_of, sources
from mooncache.conductor.core.policy.fetching import fetch_row_s, fetch_s
from mooncache.conductor.core.policy.types import NO_ROW, Branch, PrefixSource, TransferCost
from mooncache.conductor.core.records import DecisionState
from mooncache.conductor.core.registry import InstanceInfo, InstanceState
from mooncache.conductor.core.scheduler import Scheduler
from mooncache.conductor.core.snapshot import take
from mooncache.kvcache.block_index import native_index
from mooncache.kvcache.leg_hint import LoadedFrom
from tests.conductor.fleets import Row, fleet, near, request
from tests.conductor.support import BLOCK, chain, loaded, scheduler_settings

A, B, COLD_A = BlockHolder("a", False), BlockHolder("b", False), BlockHolder("a", True)
ON_A, ON_B = frozenset({"host-a"}), frozenset({"host-b"})


def test_a_holder_counts_after_some_loads_and_is_tried_again_after_a_while() -> None:
    rates = HolderRates()
    for number in range(TRUSTED):
        assert rates.bytes_per_s(A, float(number)) is None
        rates.observe(A, 1e8, 10.0, float(number))
    slow = rates.bytes_per_s(A, TRUSTED)
    assert slow == pytest.approx(1e7, rel=0.01)
    assert rates.bytes_per_s(COLD_A, TRUSTED) is None, "its disks are another holder"
    later_s = TRUSTED + FORGOTTEN_AFTER_S
    assert rates.bytes_per_s(A, later_s) is None
    for number in range(TRUSTED):
        rates.observe(A, 1e8, 0.1, later_s + number)
    fast = rates.bytes_per_s(A, later_s + TRUSTED)
    assert fast == pytest.approx(1e9, rel=0.1), "what was seen before is forgotten"
    rates.check()


def test_small_loads_say_nothing() -> None:
    rates = HolderRates()
    for number in range(2 * TRUSTED):
        rates.observe(A, 1000, 10.0, float(number))
    assert rates.bytes_per_s(A, 10.0) is None


@given(st.lists(st.integers(0, HOLDERS_MAX + 50), max_size=300))
def test_holders_are_bounded_and_the_longest_unseen_go(seen: list[int]) -> None:
    rates = HolderRates()
    for number in range(HOLDERS_MAX):
        rates.observe(BlockHolder(f"n{number}", False), 1e8, 1.0, 0.0)
    for at, number in enumerate(seen):
        for _ in range(TRUSTED):
            rates.observe(BlockHolder(f"n{number}", False), 1e8, 1.0, 1.0 + at)
    rates.check()
    assert len(rates) == HOLDERS_MAX
    for number in seen:
        assert rates.bytes_per_s(BlockHolder(f"n{number}", False), 300.0) is not None


@pytest.mark.parametrize(
    ("places", "holder"),
    [
        ((), None),
        ((("a", "dram", 10),), A),
        ((("a", "dram", 9), ("b", "dram", 1)), A),
        ((("a", "dram", 7), ("b", "dram", 3)), None),
        ((("a", "ssd", 10),), COLD_A),
        ((("a", "ssd", 5), ("a", "dram", 5)), None),
    ],
)
def test_a_load_teaches_of_the_holder_of_nearly_all_of_it(
    places: tuple[tuple[str, str, int], ...], holder: BlockHolder | None
) -> None:
    assert holder_of([LoadedFrom(*place) for place in places]) == holder


def test_runs_have_their_holders() -> None:
    a, both = (
        (BlockCopy("a", BlockTier.DRAM),),
        (BlockCopy("a", BlockTier.SSD), BlockCopy("b", BlockTier.DRAM)),
    )
    cold = (BlockCopy("a", BlockTier.SSD),)
    copies = (a, a, both, cold, a)
    assert holders_of(copies, 5) == ((A,), (B,), (COLD_A,), (A,)), "memory comes before disks"
    assert len(holders_of(copies, 5)) == len(runs_of(copies, 5, {}))
    many = tuple((copy,) for copy in (*a, *cold) * RUNS_MAX)
    assert len(holders_of(many, len(many))) == RUNS_MAX


RUNS = (PlacedRun(4, False, ON_A), PlacedRun(4, False, ON_B), PlacedRun(8, True, frozenset()))
HOLDERS = ((A,), (B,), (COLD_A,))


def priced(rates: dict[BlockHolder, float], local: Any) -> PrefixSource:
    """The pool as a source of 16 blocks; the first row is on the host of a."""
    (plain,) = sources(RUNS, local, BLOCK, 16 * BLOCK, {"host-a": [0]})
    return at_holders(plain, RUNS, HOLDERS, local, BLOCK, {"host-a": [0]}, rates.get)


def test_tokens_take_their_holders_time_and_those_of_others_that_of_their_way() -> None:
    local = np.array([0, 0, 2 * BLOCK], dtype=np.int64)
    unknown = priced({}, local)
    assert unknown.held is None and unknown.held_s is None
    slow = priced({A: 10.0}, local)
    assert slow.held is not None and slow.held.tolist() == [0, 4 * BLOCK, 2 * BLOCK], "memory here is near"
    assert slow.held_s is not None and slow.held_s.tolist() == [0.0, 4 * BLOCK / 10, 2 * BLOCK / 10]
    assert slow.on_ssd is not None and slow.on_ssd.tolist() == [8 * BLOCK] * 3
    every = priced({A: 10.0, B: 1.0, COLD_A: 4.0}, local)
    assert every.held is not None and every.held.tolist() == [12 * BLOCK, 16 * BLOCK, 14 * BLOCK]
    assert every.held_s is not None and every.held_s.tolist() == [4 * BLOCK] * 3, "the slowest of them"
    assert every.on_ssd is not None and every.on_ssd.tolist() == [0, 0, 0], "counted once"


def test_of_several_copies_all_have_to_be_known() -> None:
    local = np.zeros(1, dtype=np.int64)
    runs, holders = (PlacedRun(4, False, frozenset()),), ((A, B),)
    plain = PrefixSource(NO_ROW, 4 * BLOCK)

    def seconds(rates: dict[BlockHolder, float]) -> float | None:
        found = at_holders(plain, runs, holders, local, BLOCK, {}, rates.get)
        return None if found.held_s is None else float(found.held_s[0])

    assert seconds({A: 10.0}) is None
    assert seconds({A: 10.0, B: 30.0}) == pytest.approx(4 * BLOCK * (1 / 10 + 1 / 30) / 2)


def test_one_row_costs_what_it_costs_in_the_column_and_a_fast_holder_may_be_faster_than_its_way() -> None:
    source = random.Random(5)
    for _ in range(200):
        rows = tuple(
            Row(
                transfer=TransferCost(0.01, 10 ** source.uniform(3, 6)),
                local_tokens=source.randrange(0, 17 * BLOCK, BLOCK),
            )
            for _ in range(3)
        )
        local = np.array([row.local_tokens for row in rows], dtype=np.int64)
        known = {each: 10 ** source.uniform(2, 7) for each in (A, B, COLD_A) if source.random() < 0.6}
        offered, seen = priced(known, local), fleet(*rows)
        missing = np.maximum(16 * BLOCK - local, 0)
        seconds = fetch_s(seen, offered, missing.astype(np.float64))
        for row in range(len(rows)):
            alone = fetch_row_s(seen, row, offered, int(missing[row]))
            assert near(alone, 0.01 + float(seconds[row]))
    slow_way = fleet(Row(transfer=TransferCost(0.0, 10.0)), Row(transfer=TransferCost(0.0, 10.0)))
    fast = priced({A: 1e6, B: 1e6, COLD_A: 1e6}, np.zeros(2, dtype=np.int64))
    assert fetch_row_s(slow_way, 1, fast, 16 * BLOCK) < 0.001


def test_a_snapshot_keeps_what_holders_take() -> None:
    rows = (Row("a"), Row("b"), Row("c"))
    some, some_s = np.array([16, 32, 48], dtype=np.int64), np.array([0.5, 1.5, 2.5])
    asked = request(rows, 4200, sources=(PrefixSource(NO_ROW, 64, held=some, held_s=some_s),))
    found = take(fleet(*rows), asked, 0.0, np.array([0, 2])).policy_request().sources[0]
    assert found.held is not None and found.held.tolist() == [16, 48]
    assert found.held_s is not None and found.held_s.tolist() == [0.5, 2.5]
    assert found.on_host is None and found.on_ssd is None


def decided(core: Scheduler, node: str, now_s: float) -> Decision:
    asked = SchedulingRequest(f"r{now_s}", "m", 40 * BLOCK, keys=chain("x", 40), max_output_tokens=8)
    runs = (PlacedRun(32, False, frozenset({f"host-{node}"})),)
    pool = PoolAnswer(PoolState.OK, 32, runs=runs, holders=((BlockHolder(node, False),),))
    decision = core.schedule(asked, pool, now_s, 0.0)
    assert decision.choice.admitted
    return decision


def test_a_slow_node_is_left_and_a_fast_one_of_the_same_way_is_read() -> None:
    core = Scheduler(scheduler_settings(), random.Random(1), native_index)
    info = InstanceInfo(
        "i", 1, "both", "m", group=5, kv_bytes_per_token=131_072, block_tokens=BLOCK, host_id="host-i"
    )
    core.register(info, InstanceState.READY, 0.0)
    for number in range(1, 6):
        loaded(
            core,
            decided(core, "slow", 20.0 * number),
            LoadedFrom("slow", "dram", 32),
            60.0,
            20.0 * number + 5,
        )
        loaded(
            core,
            decided(core, "fast", 20.0 * number + 10),
            LoadedFrom("fast", "dram", 32),
            0.01,
            20.0 * number + 15,
        )
    found = {}
    for node in ("slow", "fast", "new"):
        found[node] = decided(core, node, 200.0)
        core.close(found[node].decision_id, DecisionState.ABORTED, 200.0)
    assert found["slow"].choice.branch is Branch.LOCAL
    assert found["fast"].choice.branch is Branch.FETCH
    assert found["new"].policy_request.sources[0].held is None, "the rate of the way counts"
    core.check()
