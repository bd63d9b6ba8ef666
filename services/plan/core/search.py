"""The search: the cheapest layouts for a target, and the set that nothing beats on both cost and attainment.

Branch and bound. A family fixes everything but the numbers of machines. Its lower bound is what it costs with the
fewest machines that could do each role with an unlimited pool and network; families come in the order of their bounds
and end the search when they can no longer be cheap. Within a family the model is monotone in both numbers, so for
every number of decode machines the fewest prefill machines are found by doubling and halving.

Invariant: the best plan is the one that trying every layout would find (tests compare).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Final

from mooncache.kvcache.instance_role import InstanceRole
from mooncache.plan.core.estimate import Estimator, Layout
from mooncache.plan.core.machine import InstanceType
from mooncache.plan.core.prices import cost_per_hour
from mooncache.plan.core.spec import Spec

KEEP: Final = 1.3  # families within this factor of the best are solved too, as alternatives
LADDER: Final = (0.5, 0.8, 0.9, 0.95, 0.98, 0.99, 0.995, 0.999)
SearchProgress = Callable[[int, int], None]


@dataclass(frozen=True, slots=True)
class Plan:
    """A layout with what it costs and the share of requests that the model expects within the SLOs."""

    layout: Layout
    cost_per_hour: float
    attainment: float

    @property
    def order(self) -> tuple[object, ...]:
        """Cheapest first, then the better one, then by name: never by chance."""
        return (self.cost_per_hour, -self.attainment, *self.layout.key)


def families(spec: Spec, engines: list[InstanceType]) -> Iterator[Layout]:
    """Every combination of options, with one machine of each role."""
    prefills = [engine for engine in engines if InstanceRole.PREFILL in engine.node.roles]
    decodes = [engine for engine in engines if InstanceRole.DECODE in engine.node.roles]
    options = itertools.product(
        prefills, decodes, sorted(set(spec.search.pipeline_stages)), spec.dram, spec.ssd, spec.nic
    )
    for prefill, decode, stages, dram, ssd, nic in options:
        yield Layout(prefill, decode, 1, 1, stages, dram, ssd, nic)


def allowed(spec: Spec, layout: Layout) -> bool:
    """Whether counts, pipelines and budget permit this layout."""
    same = layout.prefill.node.name == layout.decode.node.name
    used_prefill = layout.prefill_nodes + (layout.decode_nodes if same else 0)
    used_decode = layout.decode_nodes + (layout.prefill_nodes if same else 0)
    budget = spec.search.price_per_hour_max
    return (
        layout.nodes <= spec.search.nodes_max
        and used_prefill <= layout.prefill.node.count_max
        and used_decode <= layout.decode.node.count_max
        and layout.stages <= layout.prefill_instances
        and (budget is None or cost_per_hour(spec, layout) <= budget)
    )


def first_true(low: int, high: int, holds: Callable[[int], bool]) -> int | None:
    """The smallest number in low..high for which a monotone condition holds; None when it never does."""
    if low > high:
        return None
    step, below, probe = 1, low - 1, low
    while not holds(probe):
        if probe == high:
            return None
        below, probe, step = probe, min(probe + step, high), step * 2
    while probe - below > 1:
        middle = (below + probe) // 2
        if holds(middle):
            probe = middle
        else:
            below = middle
    return probe


class Searcher:
    """The search over one question; what is known about parts is kept between targets."""

    def __init__(self, spec: Spec, engines: list[InstanceType], estimator: Estimator) -> None:
        self.spec, self.estimator = spec, estimator
        self.families = list(families(spec, engines))
        self._fewest: dict[tuple[object, ...], int | None] = {}

    def plan_of(self, layout: Layout) -> Plan:
        """A layout with cost and attainment."""
        return Plan(layout, cost_per_hour(self.spec, layout), self.estimator.attainment(layout))

    def fewest_prefill(self, engine: InstanceType, stages: int, target: float) -> int | None:
        """The fewest prefill machines that could reach the target with an unlimited pool and network."""
        key = (InstanceRole.PREFILL, engine.name, stages, target)
        if key not in self._fewest:
            high = min(engine.node.count_max, self.spec.search.nodes_max - 1)
            self._fewest[key] = first_true(
                -(-stages // engine.per_node),
                high,
                lambda nodes: self.estimator.ideal_prefill(engine, nodes, stages, target),
            )
        return self._fewest[key]

    def fewest_decode(self, engine: InstanceType, target: float) -> int | None:
        """The fewest decode machines that reach the target when every first token is in time."""
        key = (InstanceRole.DECODE, engine.name, target)
        if key not in self._fewest:
            high = min(engine.node.count_max, self.spec.search.nodes_max - 1)
            self._fewest[key] = first_true(
                1, high, lambda nodes: self.estimator.ideal_decode(engine, nodes, target)
            )
        return self._fewest[key]

    def solve(
        self, target: float, keep: float = KEEP, on_progress: SearchProgress | None = None
    ) -> list[Plan]:
        """The cheapest plan of each family that reaches `target`, cheapest first; none beyond `keep` times the best."""
        bounded = []
        for number, family in enumerate(self.families):
            prefill = self.fewest_prefill(family.prefill, family.stages, target)
            decode = self.fewest_decode(family.decode, target)
            if prefill is not None and decode is not None:
                least = replace(family, prefill_nodes=prefill, decode_nodes=decode)
                bounded.append((cost_per_hour(self.spec, least), number, least))
        bounded.sort(key=lambda item: item[:2])
        found: list[Plan] = []
        best = float("inf")
        for number, (bound, _, least) in enumerate(bounded):
            if bound > best * keep:
                break
            plan = self._best_of(least, target, best * keep)
            if plan is not None:
                found.append(plan)
                best = min(best, plan.cost_per_hour)
            if on_progress is not None:
                on_progress(number + 1, len(bounded))
        return sorted(
            (plan for plan in found if plan.cost_per_hour <= best * keep), key=lambda plan: plan.order
        )

    def _best_of(self, least: Layout, target: float, limit: float) -> Plan | None:
        """The cheapest plan of a family at or below `limit`, from its fewest possible machines upwards."""
        best: Plan | None = None
        for decode in range(least.decode_nodes, least.decode.node.count_max + 1):
            start = replace(least, decode_nodes=decode)
            if not allowed(self.spec, start) or cost_per_hour(self.spec, start) > limit:
                break  # more machines only cost more
            high = self._most_prefill(start, limit)
            count = first_true(
                start.prefill_nodes,
                high,
                lambda nodes, start=start: (  # type: ignore[misc]
                    self.estimator.reaches(replace(start, prefill_nodes=nodes), target)
                ),
            )
            if count is None:
                continue
            plan = self.plan_of(replace(start, prefill_nodes=count))
            if best is None or plan.order < best.order:
                best, limit = plan, min(limit, plan.cost_per_hour)
        return best

    def _most_prefill(self, start: Layout, limit: float) -> int:
        """The most prefill machines that counts and cost permit."""

        def too_much(nodes: int) -> bool:
            layout = replace(start, prefill_nodes=nodes)
            return not allowed(self.spec, layout) or cost_per_hour(self.spec, layout) > limit

        low = start.prefill_nodes
        beyond = first_true(low, start.prefill.node.count_max + 1, too_much)
        return start.prefill.node.count_max if beyond is None else beyond - 1

    def frontier(self, target: float, on_progress: SearchProgress | None = None) -> list[Plan]:
        """Plans that no other beats on both cost and attainment, from half of the requests to as many as can be."""
        targets = sorted({*LADDER, target})
        plans: list[Plan] = []
        for number, step in enumerate(targets):
            plans += self.solve(step, keep=1.0)
            if on_progress is not None:
                on_progress(number + 1, len(targets))
        return pareto(plans)


def pareto(plans: list[Plan]) -> list[Plan]:
    """The plans that no other is at least as cheap and at least as good as; one of each, cheapest first."""
    kept: list[Plan] = []
    for plan in sorted(plans, key=lambda plan: plan.order):
        if not kept or plan.attainment > kept[-1].attainment:
            kept.append(plan)
    return kept
