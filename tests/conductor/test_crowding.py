"""Whom to refuse when more is asked for than there is: demand by cost, and what costly requests leave to others."""

from __future__ import annotations

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mooncache.conductor.core.decisions import PoolAnswer, SchedulingRequest
from mooncache.conductor.core.offered_load import CHANCE, OfferedLoad
from mooncache.conductor.core.policy.crowding import BUCKETS, FADES_IN_S, cheaper_s, room_for_cheaper_s
from mooncache.conductor.core.policy.types import Choice, Rules
from mooncache.conductor.core.registry import InstanceInfo, InstanceState
from mooncache.conductor.core.scheduler import Scheduler
from mooncache.conductor.state import native_index
from tests.conductor.fleets import COST, Row, choose, fleet, names, request
from tests.conductor.support import scheduler_settings

RULES = Rules()
costs = st.floats(1e-5, 1e4)
asked = st.lists(costs, max_size=40)


def demand_of(costs_s: list[float], at_s: float = 0.0) -> tuple[tuple[float, ...], ...]:
    demand = OfferedLoad()
    for cost_s in costs_s:
        demand.add(cost_s, at_s)
    return tuple(demand.lately(at_s))


@given(asked, costs, costs)
def test_dearer_requests_have_more_below_them_and_all_of_it_is_what_was_asked(
    costs_s: list[float], one: float, other: float
) -> None:
    low, high = sorted((one, other))
    cheaper = [cost_s for cost_s in costs_s if cost_s < one]
    for sums in demand_of(costs_s):
        assert 0.0 <= cheaper_s(sums, low) <= cheaper_s(sums, high) * (1 + 1e-9) + 1e-6
        assert sums[-1] == pytest.approx(without_chance(costs_s), abs=1e-6)
        assert cheaper_s(sums, one) <= sum(cheaper) * (1 + 1e-9)
        if 0.005 < one < 500.0:
            much_cheaper = [cost_s for cost_s in cheaper if cost_s < 0.75 * one]
            assert cheaper_s(sums, one) >= without_chance(much_cheaper) * (1 - 1e-9) - 1e-6


def without_chance(costs_s: list[float]) -> float:
    return sum(costs_s) - CHANCE * math.sqrt(sum(cost_s * cost_s for cost_s in costs_s))


def test_one_costly_request_may_be_chance_and_many_small_ones_are_not() -> None:
    one, many = (demand_of(costs_s)[0][-1] for costs_s in ([10.0], [0.1] * 100))
    assert one == pytest.approx(10.0 * (1 - CHANCE))
    assert many == pytest.approx(10.0 * (1 - CHANCE / 10))


def test_a_lasting_stream_is_seen_as_what_it_brings_and_is_forgotten_when_it_ends() -> None:
    demand = OfferedLoad()
    for step in range(2000):
        demand.add(0.3, step * 0.1)
    for sums, seconds in zip(demand.lately(200.0), FADES_IN_S, strict=True):
        assert sums[-1] / seconds == pytest.approx(3.0, rel=0.15)
    assert all(sums[-1] < 0.01 for sums in demand.lately(200.0 + 10 * max(FADES_IN_S)))


@pytest.mark.parametrize("impossible", [0.0, -1.0, math.nan, math.inf])
def test_impossible_costs_are_ignored(impossible: float) -> None:
    assert not any(sums[-1] for sums in demand_of([impossible]))


ROWS = (Row("p1", queue_s=10.0), Row("p2", queue_s=10.0), Row("d", role="decode"))


@given(asked, st.integers(1000, 200_000), st.integers(1000, 200_000), st.floats(0.0, 40.0))
def test_the_cheaper_of_two_is_taken_where_the_dearer_is(
    costs_s: list[float], one: int, other: int, queue_s: float
) -> None:
    rows = (*(row.but(queue_s=queue_s) for row in ROWS[:2]), ROWS[2])
    demand = demand_of(costs_s)
    short, long = (
        choose(rows, n, rules=RULES, ttft_slo_s=30.0, ttft_strict=True, demand=demand)
        for n in sorted((one, other))
    )
    assert short.admitted or not long.admitted


def test_the_dear_leave_room_to_the_cheap_that_ask_for_more_than_is_computed_meanwhile() -> None:
    dear = COST.seconds(40_000, 0)
    for each_s, admitted in ((0.0, True), (4.0, True), (40.0, False)):
        demand = demand_of([dear / 8] * round(2 * each_s / (dear / 8)))
        choice = choose(ROWS, 40_000, rules=RULES, ttft_slo_s=30.0, demand=demand)
        assert choice.admitted == admitted, each_s
        if not admitted:
            assert (choice.reason, choice.retry_after_s > 0) == ("ttft", True)
            assert choice.ttft_limit_s < choice.ttft_s < 30.0
        assert choose(ROWS, 2000, rules=RULES, ttft_slo_s=30.0, demand=demand).admitted


@given(st.integers(1, 200), st.integers(1000, 8000))
def test_a_batch_that_comes_at_once_leaves_its_last_ones_the_rest_of_the_promise(count: int, n: int) -> None:
    """What came is in the queue already: it is not taken for a stream that goes on for the whole promise."""
    each_s = COST.seconds(1000, 0)
    rows = (Row("p", queue_s=count * each_s), Row("d", role="decode"))
    choice = choose(
        rows, n, rules=RULES, ttft_slo_s=30.0, ttft_strict=True, demand=demand_of([each_s] * count)
    )
    left_s = 30.0 - max(0.0, count * each_s - min(FADES_IN_S))
    assert choice.admitted or choice.ttft_s > left_s


@given(st.integers(1, 400), st.floats(0.1, 25.0))
def test_equal_requests_never_give_way_to_each_other(count: int, queue_s: float) -> None:
    rows = (Row("p", queue_s=queue_s), Row("d", role="decode"))
    demand = demand_of([COST.seconds(8000, 0)] * count)
    choice = choose(rows, 8000, rules=RULES, ttft_slo_s=30.0, ttft_strict=True, demand=demand)
    assert choice.admitted == (choice.ttft_s <= 30.0)


@given(asked, st.integers(1, 200_000))
def test_who_does_not_wait_takes_nothing_from_others(costs_s: list[float], n: int) -> None:
    rows = (Row("p"), Row("d", role="decode"))
    assert choose(rows, n, rules=RULES, ttft_slo_s=30.0, demand=demand_of(costs_s)).admitted


@given(asked, st.integers(1, 200_000), st.floats(0.0, 60.0))
def test_no_request_gets_more_than_its_promise(costs_s: list[float], n: int, queue_s: float) -> None:
    rows = (Row("p", queue_s=queue_s), Row("d", role="decode"))
    choice: Choice = choose(rows, n)
    assert room_for_cheaper_s(request(rows, n, demand=demand_of(costs_s)), fleet(*rows), choice) >= 0.0


def test_an_important_request_gives_way_to_none() -> None:
    crowd = ((1e6,) * BUCKETS,) * len(FADES_IN_S)
    found = [
        choose(ROWS, 40_000, rules=RULES, ttft_slo_s=30.0, demand=crowd, priority=priority).admitted
        for priority in (-1, 0, 1)
    ]
    assert found == [False, False, True]


def test_what_a_decode_instance_computes_takes_nothing_of_the_prefill_instances() -> None:
    rows = (Row("p", queue_s=5.0), Row("d", role="decode", local_tokens=4000))
    choice = choose(rows, 4096)
    assert names(choice, rows) == ("", "d")
    crowd = ((1e6,) * BUCKETS,) * len(FADES_IN_S)
    assert room_for_cheaper_s(request(rows, 4096, demand=crowd), fleet(*rows), choice) == 0.0


def test_an_instance_that_is_in_time_is_taken_when_the_cheapest_is_not() -> None:
    """Many prompts queue for a cache: computing anew elsewhere costs more, and keeps the promise."""
    rich = Row("rich", queue_s=29.9, queue_prompts=20, local_tokens=30_000)
    rows = (rich, Row("poor", queue_s=20.0, queue_prompts=20), Row("d", role="decode"))
    assert names(choose(rows, 40_000), rows) == ("rich", "d")
    choice = choose(rows, 40_000, rules=RULES, ttft_slo_s=30.0)
    assert choice.admitted
    assert names(choice, rows) == ("poor", "d")
    full = (rich, rows[1].but(queue_s=29.0), rows[2])
    late = choose(full, 40_000, rules=RULES, ttft_slo_s=30.0)
    assert (late.admitted, late.reason) == (False, "ttft")
    assert names(late, full) == ("rich", "d"), "a refusal speaks of the cheapest"


def test_a_running_conductor_counts_all_that_is_asked_for_and_says_what_was_left() -> None:
    core = Scheduler(scheduler_settings(rules=RULES, ttft_slo_s=10.0), random.Random(1), native_index)
    for name in ("prefill", "decode"):
        core.register(InstanceInfo(name, 1, name, "m", group=1), InstanceState.READY, 0.0)
    decisions = []
    for number in range(40):
        asked = SchedulingRequest(f"r{number}", "m", 4000, keys=number.to_bytes(32, "big") * 250, group=1)
        decisions.append(core.schedule(asked, PoolAnswer(), 0.1 * number, 0.0))
    brought = [tuple(decision.policy_request.demand)[-1][-1] for decision in decisions]
    assert brought == sorted(brought), "refused ones count too"
    assert brought[-1] > max(FADES_IN_S)
    assert not decisions[-1].choice.admitted
    asked = SchedulingRequest("long", "m", 12_000, keys=b"l" * 32 * 750, group=1)
    late = core.schedule(asked, PoolAnswer(), 4.0, 0.0).record
    limit = late.to_json(RULES)
    assert '"ttft_limit_ms": 0.0' not in limit
    assert "are promised" in late.message
