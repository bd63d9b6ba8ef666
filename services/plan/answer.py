"""The answer: what was asked, what was found, how sure it is; as one document for programs."""

from __future__ import annotations

from dataclasses import asdict, dataclass

from mooncache.plan.core.certainty import Certainty, SimulatedRun
from mooncache.plan.core.estimate import Demand, Estimate, Layout
from mooncache.plan.core.prices import TokenPrices
from mooncache.plan.core.search import Plan
from mooncache.plan.core.spec import Spec


@dataclass(frozen=True, slots=True)
class Finalist:
    """A plan that was looked at closely. `runs` is empty when it was not simulated."""

    plan: Plan
    estimate: Estimate
    prices: TokenPrices
    runs: tuple[SimulatedRun, ...] = ()

    @property
    def simulated(self) -> float | None:
        """Attainment in the simulator, first seed, whole trace."""
        return self.runs[0].attainment if self.runs else None


@dataclass(frozen=True, slots=True)
class PlanReport:
    """Everything that is shown. `best` is the cheapest confirmed plan; `certainty` is about it."""

    spec: Spec
    source: str
    notes: tuple[str, ...]
    demand: Demand
    layouts_count: int
    best: Finalist
    finalists: tuple[Finalist, ...]
    frontier: tuple[Finalist, ...]
    considered: tuple[Plan, ...]
    certainty: Certainty | None
    curves: dict[str, list[float]]


def rows_of(layout: Layout) -> dict[str, object]:
    """A layout as plain values."""
    return {
        "prefill": _role(
            layout.prefill.name, layout.prefill_nodes, layout.prefill_instances, layout.prefill.measured
        ),
        "decode": _role(
            layout.decode.name, layout.decode_nodes, layout.decode_instances, layout.decode.measured
        ),
        "arrangement": layout.arrangement,
        "pipeline_stages": layout.stages,
        "dram_gb_per_machine": layout.dram.gb,
        "ssd_gb_per_machine": layout.ssd.gb,
        "nic_gbps": layout.nic.gbps,
    }


def _role(engine: str, machines: int, instances: int, measured: bool) -> dict[str, object]:
    return {"engine": engine, "machines": machines, "instances": instances, "measured": measured}


def finalist_document(finalist: Finalist) -> dict[str, object]:
    """One plan with all its numbers."""
    return {
        "name": finalist.plan.layout.name,
        "layout": rows_of(finalist.plan.layout),
        "cost_per_hour": finalist.plan.cost_per_hour,
        "cost_per_million": asdict(finalist.prices),
        "model": {
            **asdict(finalist.estimate),
            "binding": finalist.estimate.binding,
            "overloaded": finalist.estimate.overloaded,
        },
        "simulator": [asdict(run) for run in finalist.runs],
    }


def document_of(answer: PlanReport) -> dict[str, object]:
    """The whole answer for `--json`."""
    demand = answer.demand
    return {
        "asked": {
            "source": answer.source,
            "requests": len(demand),
            "rate_per_s": demand.rate_per_s,
            "input_tokens_mean": float(demand.input_tokens.mean()),
            "output_tokens_mean": float(demand.output_tokens.mean()),
            "slo": answer.spec.slo.model_dump(),
            "model": answer.spec.model.model_dump(),
            "speed": answer.spec.speed,
        },
        "notes": list(answer.notes),
        "layouts": answer.layouts_count,
        "best": finalist_document(answer.best),
        "certainty": None if answer.certainty is None else asdict(answer.certainty),
        "finalists": [finalist_document(finalist) for finalist in answer.finalists],
        "pareto": [finalist_document(finalist) for finalist in answer.frontier],
    }
