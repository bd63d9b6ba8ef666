"""The search: what trying everything finds, monotone in prices, SLOs and load, and a Pareto set that is one."""

from __future__ import annotations

import itertools
from dataclasses import replace
from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mooncache.plan.core.confirm import confirm
from mooncache.plan.core.estimate import ADMITTED, Demand, Layout
from mooncache.plan.core.machine import InstanceType
from mooncache.plan.core.search import Plan, Searcher, allowed, families, first_true, pareto
from mooncache.plan.core.spec import SearchSpec, SloSpec, Spec
from mooncache.prices.core.hardware import Dram, Nic, Ssd
from tests.plan.builders import best_cost, demand, node, searcher, spec

prices = st.floats(0.5, 40)
loads = st.builds(demand, st.just(80), st.sampled_from([0.3, 1.0, 2.5, 5.0]), st.integers(1, 4))
FEW = settings(max_examples=25)


@cache
def load_of(rate_per_s: float) -> Demand:
    return demand(80, rate_per_s)


def tried(question: Spec, finder: Searcher) -> list[Plan]:
    """Every layout there is that reaches the target."""
    engines: dict[str, InstanceType] = {}
    for family in finder.families:
        engines |= {family.prefill.name: family.prefill, family.decode.name: family.decode}
    plans = []
    for family in families(question, list(engines.values())):
        for prefill, decode in itertools.product(range(1, question.search.nodes_max), repeat=2):
            layout = replace(family, prefill_nodes=prefill, decode_nodes=decode)
            if allowed(question, layout):
                plans.append(finder.plan_of(layout))
    return plans


@FEW
@given(
    loads,
    prices,
    prices,
    st.floats(0.1, 3),
    st.sampled_from([0.5, 0.9, 0.97]),
    st.floats(2, 30),
    st.floats(0.03, 0.2),
)
def test_the_best_plan_is_the_one_that_trying_everything_finds(
    load: Demand, one: float, other: float, disk: float, target: float, ttft_s: float, tbt_s: float
) -> None:
    question = spec(
        gpu_node=(
            node(price_per_hour=one, count_max=3),
            node("B", price_per_hour=other, gpu_tflops=600, count_max=2, count_min=1),
        ),
        ssd=(Ssd(gb=0), Ssd(gb=4000, read_gb_per_s=3, price_per_hour=disk)),
        search=SearchSpec(pipeline_stages=(1, 2), nodes_max=5),
        slo=SloSpec(ttft_s=ttft_s, tbt_s=tbt_s, attainment=target),
    )
    finder = searcher(question, load)
    found = finder.solve(target)
    every = [plan for plan in tried(question, finder) if plan.attainment >= target]
    if not every:
        assert not found
        return
    assert found[0].cost_per_hour == pytest.approx(min(plan.cost_per_hour for plan in every))
    assert found[0].attainment >= target
    assert [plan.cost_per_hour for plan in found] == sorted(plan.cost_per_hour for plan in found)


@FEW
@given(
    loads, prices, prices, st.floats(0.1, 3), st.floats(0.1, 1), st.sampled_from(["A800", "B", "dram", "nic"])
)
def test_a_lower_price_never_makes_the_best_plan_dearer(
    load: Demand, one: float, other: float, memory: float, factor: float, which: str
) -> None:
    def question(lowered: str) -> Spec:
        cut = {lowered: factor}
        return spec(
            gpu_node=(
                node(price_per_hour=one * cut.get("A800", 1)),
                node("B", price_per_hour=other * cut.get("B", 1), gpu_tflops=600),
            ),
            dram=(Dram(gb=250, included=True), Dram(gb=1000, price_per_hour=memory * cut.get("dram", 1))),
            nic=(Nic(gbps=100, included=True), Nic(gbps=400, price_per_hour=memory * cut.get("nic", 1))),
        )

    assert best_cost(question(which), load) <= best_cost(question(""), load) * (1 + 1e-9)


@FEW
@given(
    loads,
    st.floats(1, 20),
    st.floats(0.03, 0.2),
    st.floats(0.5, 1),
    st.floats(1, 3),
    st.floats(1, 3),
    st.floats(0.6, 1),
)
def test_a_looser_promise_is_never_dearer(
    load: Demand, ttft_s: float, tbt_s: float, share: float, more: float, longer: float, less: float
) -> None:
    strict = SloSpec(ttft_s=ttft_s, tbt_s=tbt_s, attainment=share)
    loose = SloSpec(ttft_s=ttft_s * more, tbt_s=tbt_s * longer, attainment=share * less)
    assert best_cost(spec(slo=loose), load) <= best_cost(spec(slo=strict), load) * (1 + 1e-9)


@FEW
@given(loads, st.floats(1, 6))
def test_more_load_is_never_cheaper(load: Demand, factor: float) -> None:
    assert best_cost(spec(), load) <= best_cost(spec(), load.faster(factor)) * (1 + 1e-9)


@FEW
@given(loads, st.integers(1, 3), st.integers(1, 3))
def test_more_machines_never_serve_fewer(load: Demand, prefill: int, decode: int) -> None:
    finder = searcher(spec(), load)
    layout = replace(finder.families[0], prefill_nodes=prefill, decode_nodes=decode)
    served = finder.estimator.attainment(layout)
    assert finder.estimator.attainment(replace(layout, prefill_nodes=prefill + 1)) >= served
    assert finder.estimator.attainment(replace(layout, decode_nodes=decode + 1)) >= served
    assert finder.estimator.reaches(layout, served) or served < min(ADMITTED)


@FEW
@given(loads, prices)
def test_no_plan_of_the_pareto_set_is_beaten(load: Demand, price: float) -> None:
    question = spec(
        gpu_node=(node(), node("B", price_per_hour=price, gpu_tflops=600)),
        search=SearchSpec(pipeline_stages=(1,), nodes_max=5),
    )
    finder = searcher(question, load)
    front = finder.frontier(0.9)
    for plan in tried(question, finder):
        for kept in front:
            better = plan.cost_per_hour < kept.cost_per_hour and plan.attainment >= kept.attainment
            assert not better, f"{plan} beats {kept}"
    for one, other in itertools.pairwise(front):
        assert one.cost_per_hour < other.cost_per_hour
        assert one.attainment < other.attainment


@given(st.integers(-5, 40), st.integers(0, 60), st.integers(-10, 120))
def test_first_true_finds_the_first(low: int, width: int, edge: int) -> None:
    high = low + width
    expected = next((number for number in range(low, high + 1) if number >= edge), None)
    assert first_true(low, high, lambda number: number >= edge) == expected


def layouts(count: int) -> list[Layout]:
    family = searcher(spec(), load_of(1.0)).families[0]
    return [replace(family, prefill_nodes=number) for number in range(1, count + 1)]


def plan_of(layout: Layout) -> Plan | None:
    if layout.prefill_nodes > 6 or layout.decode_nodes > 3:
        return None
    nodes = layout.prefill_nodes + layout.decode_nodes
    return Plan(layout, 10.0 * nodes, min(1.0, 0.2 * nodes))


@given(st.integers(1, 6), st.integers(2, 9))
def test_the_simulator_has_the_last_word(begin: int, needed: int) -> None:
    first = plan_of(layouts(begin)[-1])
    assert first is not None
    found = confirm(
        [first], 0.9, plan_of, lambda layout: 1.0 if layout.nodes >= needed else 0.0, wanted=1, at_most=40
    )
    assert found.best is not None
    assert found.best.layout.nodes >= needed
    asked = [plan.layout.key for plan, _ in found.simulated]
    assert len(asked) == len(set(asked))
    cheaper_and_good = [
        plan
        for plan, share in found.simulated
        if share >= 0.9 and plan.cost_per_hour < found.best.cost_per_hour
    ]
    assert not cheaper_and_good


def test_simulations_are_bounded() -> None:
    plans = [plan for layout in layouts(6) if (plan := plan_of(layout))]
    found = confirm(plans, 0.9, plan_of, lambda _: 0.0, wanted=1, at_most=4)
    assert found.best is None
    assert len(found.simulated) == 4


def test_pareto_of_equal_plans_is_one() -> None:
    layout = layouts(1)[0]
    same = [Plan(layout, 5.0, 0.9), Plan(layout, 5.0, 0.9), Plan(layout, 6.0, 0.9), Plan(layout, 4.0, 0.8)]
    assert [(plan.cost_per_hour, plan.attainment) for plan in pareto(same)] == [(4.0, 0.8), (5.0, 0.9)]
