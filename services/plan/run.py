"""One plan from beginning to end: statistical search, simulator for the finalists, how sure it is."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Final

import numpy as np

from mooncache.errors import PlanUnconfirmed
from mooncache.plan import loading, simulation, workload
from mooncache.plan.answer import Finalist, PlanReport
from mooncache.plan.core import limits, machine, variants
from mooncache.plan.core.certainty import SPAN_FINE_S, Certainty, SimulatedRun, judge, load_margin
from mooncache.plan.core.confirm import Confirmed, confirm
from mooncache.plan.core.estimate import Demand, Estimator, Layout
from mooncache.plan.core.prices import token_prices
from mooncache.plan.core.search import Plan, Searcher, allowed, pareto
from mooncache.plan.core.spec import GB, Arrangement, Spec
from mooncache.plan.loading import Question
from mooncache.simulate.profile import ModelProfile
from mooncache.simulate.result import Result
from mooncache.traces import Trace, TracePart

PlanProgress = Callable[[str, float], None]
CURVE_POINTS: Final = 40
PARETO_MAX: Final = 12


@dataclass(frozen=True, slots=True)
class Effort:
    """How much is simulated: finalists wanted, runs at most, seeds for the best; 0 finalists is the model alone."""

    finalists: int = 3
    runs_max: int = 12
    seeds: int = 3
    requests_max: int = 6_000


def _no_progress(_what: str, _share: float) -> None:
    """Progress that is not shown."""


class Planner:
    """The parts of one question, kept between its steps."""

    def __init__(
        self, trace: Trace, question: Question, source: str, on_progress: PlanProgress = _no_progress
    ) -> None:
        self.spec, self.source, self.on_progress = question.spec, source, on_progress
        self.bases: dict[str, ModelProfile] = {
            node.name: loading.find_profile(node.profile or self.spec.model.profile)
            for node in self.spec.gpu_node
        }
        measured = {name: loading.of_profile(profile) for name, profile in self.bases.items()}
        self.engines = machine.engines(
            measured, self.spec.gpu_node, self.spec.search.gpus_per_instance, self.spec.model.memory_share
        )
        self.trace = workload.busiest(trace.speed(self.spec.speed), self.spec.search.requests_max)
        self.demand: Demand = workload.demand_of(self.trace)
        kv_bytes = max(engine.kv_bytes_per_token for engine in self.engines)
        self.estimator = Estimator(self.demand, self.spec.slo, trace.block_tokens * kv_bytes)
        self.sampled = self.estimator  # over what is simulated
        self.notes = _notes(self.spec, question, self.demand, cut=len(self.trace) < len(trace))
        self.results: dict[tuple[object, ...], tuple[SimulatedRun, Result]] = {}

    def search(self) -> tuple[Searcher, list[Plan], list[Plan]]:
        """(the searcher, plans that reach the target, the Pareto set). Raises when there is none."""
        self.on_progress("Statistical model", 0.0)
        limits.check_reachable(self.spec, self.engines, self.estimator)
        searcher = Searcher(self.spec, self.engines, self.estimator)
        target = self.spec.slo.attainment
        plans = searcher.solve(
            target, on_progress=lambda done, total: self.on_progress("Statistical model", 0.7 * done / total)
        )
        if not plans:
            raise limits.explain_infeasible(self.spec, self.engines, self.estimator)
        frontier = searcher.frontier(
            target, lambda done, total: self.on_progress("Pareto set", 0.7 + 0.3 * done / total)
        )
        return searcher, plans, pareto([*frontier, plans[0]])

    def confirm(self, searcher: Searcher, plans: list[Plan], effort: Effort) -> Confirmed:
        """Simulate finalists, cheapest first, and then other uses of their machines."""
        sample = workload.busiest(self.trace, effort.requests_max)
        if len(sample) < len(self.trace):
            self.notes.append(f"Finalists are simulated on the busiest {len(sample):,} requests.")
            demand = workload.demand_of(sample)
            self.sampled = Estimator(demand, self.spec.slo, self.estimator.block_bytes)
        tried = self.spec.search.arrangements
        count, most = 0, effort.runs_max + variants.RUNS_EACH * len(tried)

        def simulate(layout: Layout) -> float:
            nonlocal count
            count += 1
            begin = (count - 1) / most
            what = f"Simulator, plan {count}"
            run, result = self.simulate(
                layout, sample, 1, TracePart.WHOLE, lambda share: self.on_progress(what, begin + share / most)
            )
            self.results[layout.key] = (run, result)
            return run.attainment

        def plan_of(layout: Layout) -> Plan | None:
            possible = min(layout.prefill_nodes, layout.decode_nodes) > 0 and allowed(self.spec, layout)
            return searcher.plan_of(layout) if possible else None

        found = confirm(
            _distinct(plans),
            self.spec.slo.attainment,
            plan_of,
            simulate,
            wanted=effort.finalists,
            at_most=effort.runs_max,
        )
        if found.best is None:
            closest = max(found.simulated, key=lambda item: item[1])
            wanted = self.spec.slo.attainment
            raise PlanUnconfirmed(
                f"The simulator was asked about {len(found.simulated)} plans; the best of them serves {closest[1]:.1%} "
                f"of the requests within the SLOs, {wanted:.1%} are wanted ({closest[0].layout.name})."
            )
        target = self.spec.slo.attainment
        more = variants.explore(tried, plans, found.best, target, plan_of, simulate)
        if tried and not more:
            self.notes.append(
                "Switching roles and instances that do both were not tried: no plan at this price has equal machines."
            )
        return Confirmed((*found.simulated, *more), variants.cheapest(found.best, more, target))

    def simulate(
        self,
        layout: Layout,
        trace: Trace,
        seed: int,
        part: TracePart,
        on_progress: Callable[[float], None] | None = None,
    ) -> tuple[SimulatedRun, Result]:
        """One run of a layout."""
        cluster = simulation.cluster_of(layout, self.bases, self.spec.slo, self.trace.block_tokens)
        return simulation.run(trace, cluster, self.spec.slo, seed, part, on_progress)

    def runs_of(self, plan: Plan, effort: Effort) -> list[SimulatedRun]:
        """All runs of the best plan: further seeds, and each half of the trace alone."""
        sample = workload.busiest(self.trace, effort.requests_max)
        runs = [self.results[plan.layout.key][0]]
        further = [(sample, seed, TracePart.WHOLE) for seed in range(2, effort.seeds + 1)]
        halves = [(sample.part(part), 1, part) for part in (TracePart.FIRST_HALF, TracePart.SECOND_HALF)]
        further += [half for half in halves if len(half[0]) > 1]
        for number, (trace, seed, part) in enumerate(further):
            begin, width = number / len(further), 1 / len(further)
            runs.append(
                self.simulate(
                    plan.layout,
                    trace,
                    seed,
                    part,
                    lambda share, begin=begin, width=width: self.on_progress(
                        "How sure", begin + width * share
                    ),  # type: ignore[misc]
                )[0]
            )
        return runs

    def finalist(self, plan: Plan, runs: tuple[SimulatedRun, ...] = ()) -> Finalist:
        """A plan with everything that is known about it."""
        return Finalist(
            plan,
            self.estimator.estimate(plan.layout),
            token_prices(self.spec, plan.layout, self.estimator),
            runs,
        )

    def answer(self, effort: Effort) -> PlanReport:
        """The whole way. Raises SloUnreachable, PlanInfeasible or PlanUnconfirmed."""
        searcher, plans, frontier = self.search()
        certainty: Certainty | None = None
        simulated: list[Finalist] = []
        best = plans[0]
        best_runs: tuple[SimulatedRun, ...] = ()
        if effort.finalists:
            found = self.confirm(searcher, plans, effort)
            assert found.best is not None
            best = found.best
            runs = self.runs_of(best, effort)
            best_runs = tuple(runs)
            certainty = self.certainty(best, runs)
            for plan, _ in found.simulated:
                own = best_runs if plan.layout.key == best.layout.key else (self.results[plan.layout.key][0],)
                simulated.append(self.finalist(plan, own))
        self.on_progress("Done", 1.0)
        return PlanReport(
            spec=self.spec,
            source=self.source,
            notes=tuple(self.notes),
            demand=self.demand,
            layouts_count=len(searcher.families),
            best=self.finalist(best, best_runs),
            finalists=tuple(simulated),
            frontier=tuple(self.finalist(plan) for plan in _thinned(frontier, PARETO_MAX)),
            considered=tuple(plans),
            certainty=certainty,
            curves=self.curves(best),
        )

    def certainty(self, plan: Plan, runs: list[SimulatedRun]) -> Certainty:
        """How sure a simulated plan is."""
        layout, slo = plan.layout, self.spec.slo
        scaled = sorted({engine.name for engine in (layout.prefill, layout.decode) if not engine.measured})
        facts = []
        modelled = layout.arrangement is Arrangement.FIXED
        if not modelled:
            facts.append(
                "the statistical model knows fixed roles only: this plan is the simulator's word alone"
            )
        if scaled:
            base = self.bases[layout.prefill.node.name].name
            facts.append(f"{' and '.join(scaled)}: scaled from {base}, not measured")
        if self.demand.span_s < SPAN_FINE_S:
            facts.append(f"the workload is {self.demand.span_s:,.0f} s long, 15 min or more would say more")
        margin = load_margin(self.sampled, layout, slo.attainment)
        estimate = self.sampled.estimate(layout)
        promises = (slo.ttft_s, slo.tbt_s)
        return judge(estimate, runs, slo.attainment, promises, margin, facts, modelled=modelled)

    def curves(self, best: Plan) -> dict[str, list[float]]:
        """What plots need: hit ratio by pool size, and the distributions of the best plan in model and simulator."""
        reuse, tokens = self.demand.reuse, self.demand.input_tokens
        top = max(reuse.blocks_max, 2)
        blocks = np.geomspace(max(1.0, top / 1e4), 1.3 * top, CURVE_POINTS)
        admitted, _ = self.sampled.admitted(best.layout)
        first = self.sampled.first_tokens(best.layout, admitted)
        steps = self.sampled.steps(best.layout.decode, best.layout.decode_nodes, admitted)
        curves = {
            "pool_gb": (blocks * self.estimator.block_bytes / GB).tolist(),
            "hit_ratio": [float(reuse.cached_tokens(size).sum() / tokens.sum()) for size in blocks],
            "requests": [float(len(self.sampled.demand))],
            "model_ttft_s": first.ttft_s.tolist(),
            "model_tbt_s": steps.tbt_s.tolist(),
        }
        if best.layout.key in self.results:
            result = self.results[best.layout.key][1]
            curves["simulated_ttft_s"] = result.ttft_s[result.done].tolist()
            curves["simulated_tbt_s"] = result.tbt_s[result.done].tolist()
        return curves


def plan(
    trace: Trace,
    question: Question,
    source: str,
    effort: Effort | None = None,
    on_progress: PlanProgress = _no_progress,
) -> PlanReport:
    """The cheapest configurations for a workload.

    Args:
        trace: the workload. question: what is asked. source: where the workload comes from, for the report.
        on_progress: (what is being done, share of it that is done).

    Raises PlanInvalid, ModelDoesNotFit, SloUnreachable, PlanInfeasible, PlanUnconfirmed.
    """
    return Planner(trace, question, source, on_progress).answer(effort or Effort())


def _notes(spec: Spec, question: Question, demand: Demand, *, cut: bool) -> list[str]:
    notes = []
    if question.from_example:
        tables = ", ".join(question.from_example)
        notes.append(f"Made-up example values are used for {tables}: put your own prices into --spec.")
    if cut:
        notes.append(
            f"The busiest {len(demand):,} requests of the trace are planned for (search.requests_max)."
        )
    if spec.speed != 1:
        notes.append(f"The trace arrives {spec.speed:g} times as fast as recorded.")
    return notes


def _distinct(plans: list[Plan]) -> list[Plan]:
    """The cheapest plan of each pair of roles and counts: finalists that differ in more than a disk."""
    seen: set[tuple[object, ...]] = set()
    kept = []
    for plan in plans:
        layout = plan.layout
        key = (
            layout.prefill.name,
            layout.prefill_nodes,
            layout.decode.name,
            layout.decode_nodes,
            layout.stages,
        )
        if key not in seen:
            seen.add(key)
            kept.append(replace(plan))
    return kept


def _thinned(plans: list[Plan], most: int) -> list[Plan]:
    """At most so many of a row of plans, first and last among them."""
    if len(plans) <= most:
        return plans
    picked = sorted({round(number * (len(plans) - 1) / (most - 1)) for number in range(most)})
    return [plans[number] for number in picked]
