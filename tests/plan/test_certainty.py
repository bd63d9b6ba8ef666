"""How sure a plan is: each doubt has its number, and the word follows from them."""

from __future__ import annotations

from dataclasses import replace

import pytest

from mooncache.plan.core.certainty import Certainty, SimulatedRun, judge, load_margin
from mooncache.plan.core.spec import SloSpec
from mooncache.traces import TracePart
from tests.plan.builders import demand, searcher, spec

GOOD = SimulatedRun(
    part=TracePart.WHOLE,
    seed=1,
    attainment=0.97,
    ttft_mean_s=2.0,
    ttft_p90_s=5.0,
    ttft_p99_s=9.0,
    ttft_at_target_s=7.0,
    tbt_mean_s=0.04,
    tbt_p90_s=0.05,
    tbt_at_target_s=0.06,
    hit_ratio=0.3,
    goodput_per_s=3.0,
    refused=0.0,
    wall_s=1.0,
)


def judged(runs: list[SimulatedRun], more_load: float = 0.5, facts: tuple[str, ...] = ()) -> Certainty:
    finder = searcher(spec(), demand())
    layout = replace(finder.families[0], prefill_nodes=4, decode_nodes=2)
    estimate = replace(finder.estimator.estimate(layout), attainment=0.975)
    return judge(estimate, runs, 0.95, (15.0, 0.1), more_load, list(facts))


def test_a_plan_without_doubts_is_sure() -> None:
    certainty = judged([GOOD, replace(GOOD, seed=2), replace(GOOD, part=TracePart.FIRST_HALF)])
    assert (certainty.word, certainty.doubts) == ("high", ())
    assert certainty.attainment_gap == pytest.approx(0.005)
    assert certainty.ttft_margin == pytest.approx(1 - 7 / 15)
    assert certainty.tbt_margin == pytest.approx(0.4)


@pytest.mark.parametrize(
    ("runs", "more_load", "facts", "said"),
    [
        ([replace(GOOD, attainment=1.0)], 0.5, (), "differ by 2.5%"),
        ([GOOD, replace(GOOD, part=TracePart.SECOND_HALF, attainment=0.91)], 0.5, (), "only 91.0% are"),
        ([replace(GOOD, ttft_at_target_s=14.5)], 0.5, (), "TTFT has 3% to spare"),
        ([replace(GOOD, tbt_at_target_s=0.2)], 0.5, (), "TBT has 0% to spare"),
        ([GOOD], 0.04, (), "4% more load"),
        ([GOOD], 0.5, ("H20 x8: scaled",), "H20 x8: scaled"),
    ],
)
def test_every_doubt_is_said_with_its_number(
    runs: list[SimulatedRun], more_load: float, facts: tuple[str, ...], said: str
) -> None:
    certainty = judged(runs, more_load, facts)
    assert any(said in doubt for doubt in certainty.doubts)
    assert certainty.word == "fair"


def test_a_seed_that_misses_makes_it_unsure() -> None:
    certainty = judged([GOOD, replace(GOOD, seed=2, attainment=0.94)])
    assert certainty.word == "low"
    assert certainty.seeds_low == 0.94


@pytest.mark.parametrize("prefill", [2, 4, 6])
def test_the_margin_of_the_load_is_where_the_target_is_missed(prefill: int) -> None:
    finder = searcher(spec(slo=SloSpec(ttft_s=10, tbt_s=0.08, attainment=0.9)), demand(200, 2.0))
    layout = replace(finder.families[0], prefill_nodes=prefill, decode_nodes=2)
    margin = load_margin(finder.estimator, layout, 0.9)
    for factor, kept in ((1 + margin, True), ((1 + margin) * 1.03, False)):
        faster = searcher(
            spec(slo=SloSpec(ttft_s=10, tbt_s=0.08, attainment=0.9)), demand(200, 2.0).faster(factor * 0.9999)
        )
        assert faster.estimator.reaches(layout, 0.9) is kept
