"""Which plan the simulator confirms: the statistical model proposes, the simulator decides.

Candidates are simulated from the cheapest upwards. One that fails brings its neighbours with one machine more of a
role (the model was too hopeful there); one that succeeds brings its neighbours with one machine less (it may have
been too careful). The best plan is the cheapest that the simulator confirmed; the number of simulations is bounded.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

from mooncache.plan.core.estimate import Layout
from mooncache.plan.core.search import Plan

CAREFUL: float = 0.15  # how far below the target the model may see a smaller neighbour that is still tried


@dataclass(frozen=True, slots=True)
class Confirmed:
    """Every plan that was simulated, with its attainment there, in order; and the cheapest that met the target."""

    simulated: tuple[tuple[Plan, float], ...]
    best: Plan | None


def neighbours(layout: Layout, step: int) -> list[Layout]:
    """One machine more (or less) for prefill, and for decode."""
    return [
        replace(layout, prefill_nodes=layout.prefill_nodes + step),
        replace(layout, decode_nodes=layout.decode_nodes + step),
    ]


def confirm(
    plans: Iterable[Plan],
    target: float,
    plan_of: Callable[[Layout], Plan | None],
    simulate: Callable[[Layout], float],
    *,
    wanted: int,
    at_most: int,
) -> Confirmed:
    """Simulate until `wanted` plans met the target and no cheaper candidate is left, or `at_most` were simulated.

    Args:
        plans: what the statistical model found.
        plan_of: a layout as a plan; None when counts or budget do not permit it.
        simulate: the attainment of a layout in the simulator.
    """
    heap: list[tuple[tuple[object, ...], Plan]] = []
    known: set[tuple[object, ...]] = set()

    def offer(plan: Plan | None) -> None:
        if plan is not None and plan.layout.key not in known:
            known.add(plan.layout.key)
            heapq.heappush(heap, (plan.order, plan))

    for plan in plans:
        offer(plan)
    done: list[tuple[Plan, float]] = []
    best: tuple[tuple[object, ...], Plan] | None = None  # at equal cost the one that did better
    met = 0
    while heap and len(done) < at_most:
        plan = heapq.heappop(heap)[1]
        if met >= wanted and best is not None and plan.cost_per_hour >= best[1].cost_per_hour:
            break
        share = simulate(plan.layout)
        done.append((plan, share))
        if share < target:
            for layout in neighbours(plan.layout, 1):
                offer(plan_of(layout))
            continue
        met += 1
        rank = (plan.cost_per_hour, -share, *plan.order)
        if best is None or rank < best[0]:
            best = (rank, plan)
        for layout in neighbours(plan.layout, -1):
            smaller = plan_of(layout) if layout.prefill_nodes and layout.decode_nodes else None
            if smaller is not None and smaller.attainment >= target - CAREFUL:
                offer(smaller)
    return Confirmed(tuple(done), best[1] if best else None)
