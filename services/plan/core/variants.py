"""Other uses of the same machines: roles that follow the load, and instances that both prefill and decode.

The statistical model knows fixed roles only, so these are the simulator's alone: from the cheapest plan with one kind
of machine, as many of them as cost no more than the best plan, and then one fewer as long as the SLOs are kept.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

from mooncache.plan.core.estimate import Layout
from mooncache.plan.core.search import Plan
from mooncache.plan.core.spec import Arrangement, Variant

RUNS_EACH: int = 3


def smaller(layout: Layout) -> Layout | None:
    """The layout with one machine less where there are more; None when that would leave a role without any."""
    if layout.nodes <= 2:
        return None
    if layout.prefill_nodes >= layout.decode_nodes:
        return replace(layout, prefill_nodes=layout.prefill_nodes - 1)
    return replace(layout, decode_nodes=layout.decode_nodes - 1)


def uniform(plans: Iterable[Plan]) -> Plan | None:
    """The cheapest plan whose roles are on equal instances: only those can change places."""
    equal = [plan for plan in plans if plan.layout.prefill.name == plan.layout.decode.name]
    return min(equal, key=lambda plan: plan.order, default=None)


def explore(
    arrangements: Sequence[Variant],
    plans: Iterable[Plan],
    best: Plan,
    target: float,
    plan_of: Callable[[Layout], Plan | None],
    simulate: Callable[[Layout], float],
) -> list[tuple[Plan, float]]:
    """Every variant that was simulated, with its attainment; none when all plans are of different machines.

    Args:
        plans: what the statistical model found, of fixed roles. best: the cheapest that was confirmed.
        plan_of: a layout as a plan; None when counts or budget do not permit it.
        simulate: the attainment of a layout in the simulator.
    """
    base = uniform(plans)
    if base is None:
        return []
    done: list[tuple[Plan, float]] = []
    for arrangement in arrangements:
        stages = 1 if arrangement is Arrangement.BOTH else base.layout.stages
        layout: Layout | None = replace(base.layout, arrangement=arrangement, stages=stages)
        runs = 0
        while layout is not None and runs < RUNS_EACH:
            plan = plan_of(layout)
            if plan is not None and plan.cost_per_hour <= best.cost_per_hour:
                share = simulate(layout)
                runs += 1
                done.append((plan, share))
                if share < target:
                    break
            layout = smaller(layout)
    return done


def cheapest(best: Plan, variants: Iterable[tuple[Plan, float]], target: float) -> Plan:
    """The best plan, or a variant that keeps the SLOs for less; at equal cost the one with fixed roles stays."""
    met = [plan for plan, share in variants if share >= target and plan.cost_per_hour < best.cost_per_hour]
    return min(met, key=lambda plan: plan.order, default=best)
