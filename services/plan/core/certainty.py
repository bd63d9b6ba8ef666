"""How sure a plan is: agreement of model and simulator, spread over seeds, both halves of the trace, margins.

Every doubt is a sentence with its number. The one word in front is only their count.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

from mooncache.plan.core.estimate import Estimate, Estimator, Layout, LayoutFigures
from mooncache.traces import TracePart

GAP_FINE: Final = 0.02  # difference in attainment between model and simulator
MARGIN_FINE: Final = 0.1  # distance to an SLO or of the load, relative
SPAN_FINE_S: Final = 900.0
_FASTEST: Final = 8.0


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedRun(LayoutFigures):
    """One simulation of a layout."""

    part: TracePart
    seed: int
    refused: float
    wall_s: float


@dataclass(frozen=True, slots=True)
class Certainty:
    """What speaks for and against a plan; shares are of requests, margins relative to the limit."""

    word: Literal["high", "fair", "low"]
    doubts: tuple[str, ...]
    attainment_gap: float
    ttft_ratio: float
    tbt_ratio: float
    seeds_low: float
    seeds_high: float
    halves: tuple[float, ...]
    ttft_margin: float
    tbt_margin: float
    load_margin: float
    modelled: bool = True  # whether the statistical model knows this arrangement


def load_margin(estimator: Estimator, layout: Layout, target: float) -> float:
    """How much faster than now the same requests may arrive, by the model: 0.2 is 20 % more; at most 700 %."""

    def holds(factor: float) -> bool:
        faster = Estimator(estimator.demand.faster(factor), estimator.slo, estimator.block_bytes)
        return faster.reaches(layout, target)

    low, high = 1.0, 2.0
    while high <= _FASTEST and holds(high):
        low, high = high, high * 2
    if high > _FASTEST:
        return _FASTEST - 1
    if low == 1.0 and not holds(1.0):
        low, high = 0.25, 1.0
    while high / low > 1.02:
        middle = (low * high) ** 0.5
        if holds(middle):
            low = middle
        else:
            high = middle
    return low - 1


def judge(
    estimate: Estimate,
    runs: list[SimulatedRun],
    target: float,
    slo: tuple[float, float],
    more_load: float,
    facts: list[str],
    *,
    modelled: bool = True,
) -> Certainty:
    """How sure a layout is.

    Args: slo: (TTFT, TBT) seconds; facts: doubts that are known beforehand; modelled: whether the statistical model
    knows this arrangement, so that its numbers say something.
    """
    whole = [run for run in runs if run.part == TracePart.WHOLE]
    first = whole[0]
    shares = [run.attainment for run in whole]
    halves = tuple(run.attainment for run in runs if run.part != TracePart.WHOLE)
    gap = estimate.attainment - first.attainment
    ttft_margin = 1 - max(run.ttft_at_target_s for run in whole) / slo[0]
    tbt_margin = 1 - max(run.tbt_at_target_s for run in whole) / slo[1]
    doubts = list(facts)
    if modelled and abs(gap) > GAP_FINE:
        doubts.append(f"model and simulator differ by {abs(gap):.1%} in attainment")
    if min(shares) < target:
        doubts.append(f"with another seed only {min(shares):.1%} are within the SLOs")
    if halves and min(halves) < target:
        doubts.append(f"on one half of the trace alone only {min(halves):.1%} are")
    if ttft_margin < MARGIN_FINE:
        doubts.append(f"TTFT has {max(ttft_margin, 0):.0%} to spare")
    if tbt_margin < MARGIN_FINE:
        doubts.append(f"TBT has {max(tbt_margin, 0):.0%} to spare")
    if modelled and more_load < MARGIN_FINE:
        doubts.append(f"{max(more_load, 0):.0%} more load would be too much")
    return Certainty(
        word="high" if not doubts else "fair" if len(doubts) <= 2 and min(shares) >= target else "low",
        doubts=tuple(doubts),
        attainment_gap=gap,
        ttft_ratio=_ratio(estimate.ttft_mean_s, first.ttft_mean_s),
        tbt_ratio=_ratio(estimate.tbt_mean_s, first.tbt_mean_s),
        seeds_low=min(shares),
        seeds_high=max(shares),
        halves=halves,
        ttft_margin=ttft_margin,
        tbt_margin=tbt_margin,
        load_margin=more_load,
        modelled=modelled,
    )


def _ratio(model: float, simulated: float) -> float:
    return model / simulated if simulated > 0 else float("inf")
