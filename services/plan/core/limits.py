"""Why nothing meets the SLOs: which limit binds, and by how much.

Two kinds of "no". An SLO may be beyond what an idle cluster of any size does (SloUnreachable): no purchase helps. Or
counts and budget end before enough machines are there (PlanInfeasible): then the same search without these limits
tells what would be needed.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from mooncache.errors import PlanInfeasible, SloUnreachable
from mooncache.kvcache.instance_role import InstanceRole
from mooncache.plan.core.estimate import Estimator
from mooncache.plan.core.machine import Floats, InstanceType
from mooncache.plan.core.search import Plan, Searcher, families
from mooncache.plan.core.spec import Spec

_RELAX: int = 32


def check_reachable(spec: Spec, engines: list[InstanceType], estimator: Estimator) -> None:
    """Raises SloUnreachable when an idle cluster with an unlimited cache does not meet the SLOs for enough requests."""
    decodes = [engine for engine in engines if InstanceRole.DECODE in engine.node.roles]
    prefills = [engine for engine in engines if InstanceRole.PREFILL in engine.node.roles]
    if not decodes or not prefills:
        missing = InstanceRole.DECODE if not decodes else InstanceRole.PREFILL
        raise SloUnreachable(f"The model fits on no machine type that may do {missing}.")
    _check_kv(spec, decodes, estimator)
    _check_tbt(spec, decodes, estimator)
    _check_ttft(spec, prefills, estimator)


def _sequence_tokens(estimator: Estimator) -> Floats:
    return estimator.demand.input_tokens + estimator.demand.output_tokens


def _check_kv(spec: Spec, decodes: list[InstanceType], estimator: Estimator) -> None:
    largest = max(decodes, key=lambda engine: engine.kv_capacity_tokens)
    tokens = _sequence_tokens(estimator)
    if np.mean(tokens <= largest.kv_capacity_tokens) < spec.slo.attainment:
        needed = float(np.quantile(tokens, spec.slo.attainment, method="higher"))
        lack_gb = (needed - largest.kv_capacity_tokens) * largest.kv_bytes_per_token / 1e9
        raise SloUnreachable(
            f"KV memory: {spec.slo.attainment:.1%} of the requests have up to {needed:,.0f} tokens, "
            f"{largest.name} holds {largest.kv_capacity_tokens:,.0f} besides the weights "
            f"({lack_gb:.1f} GB are missing)."
        )


def _check_tbt(spec: Spec, decodes: list[InstanceType], estimator: Estimator) -> None:
    kv = estimator.demand.input_tokens + estimator.demand.output_tokens / 2
    alone = {engine.name: engine.step_s(np.ones(len(kv)), kv) for engine in decodes}
    name = max(
        alone, key=lambda name: (float(np.mean(alone[name] <= spec.slo.tbt_s)), -float(alone[name].min()))
    )
    if np.mean(alone[name] <= spec.slo.tbt_s) >= spec.slo.attainment:
        return
    engine = next(engine for engine in decodes if engine.name == name)
    limit_ms, base_ms = spec.slo.tbt_s * 1e3, engine.step_base_s * 1e3
    if base_ms >= limit_ms:
        raise SloUnreachable(
            f"TBT {limit_ms:g} ms: an empty batch on {name} takes {base_ms:.1f} ms, "
            f"{base_ms - limit_ms:.1f} ms too long."
        )
    needed_ms = float(np.quantile(alone[name], spec.slo.attainment, method="higher")) * 1e3
    raise SloUnreachable(
        f"TBT {limit_ms:g} ms: {spec.slo.attainment:.1%} of the requests, each alone on {name}, take up to "
        f"{needed_ms:.1f} ms per token, {needed_ms - limit_ms:.1f} ms too long."
    )


def _check_ttft(spec: Spec, prefills: list[InstanceType], estimator: Estimator) -> None:
    stages = max(spec.search.pipeline_stages)
    alone = {engine.name: estimator.computing(engine, estimator.unlimited, stages)[1] for engine in prefills}
    name = max(
        alone, key=lambda name: (float(np.mean(alone[name] <= spec.slo.ttft_s)), -float(alone[name].mean()))
    )
    if np.mean(alone[name] <= spec.slo.ttft_s) >= spec.slo.attainment:
        return
    needed_s = float(np.quantile(alone[name], spec.slo.attainment, method="higher"))
    how = f"pipelines of {stages} " if stages > 1 else ""
    raise SloUnreachable(
        f"TTFT {spec.slo.ttft_s:g} s: {spec.slo.attainment:.1%} of the prompts, each alone on {how}{name} "
        f"with all cached that can be, take up to {needed_s:.2f} s to compute, "
        f"{needed_s - spec.slo.ttft_s:.2f} s too long."
    )


def explain_infeasible(spec: Spec, engines: list[InstanceType], estimator: Estimator) -> PlanInfeasible:
    """The error that says which of the limits on machines and money ends the search, and what would be needed."""
    budget = spec.search.price_per_hour_max
    if budget is not None:
        free = spec.model_copy(update={"search": spec.search.model_copy(update={"price_per_hour_max": None})})
        plan = _cheapest(free, engines, estimator)
        if plan is not None:
            more = plan.cost_per_hour - budget
            return PlanInfeasible(
                f"The budget of {budget:g} per hour binds: the cheapest plan costs {plan.cost_per_hour:.2f}, "
                f"{more:.2f} more ({plan.layout.name})."
            )
    plan = _cheapest(_relaxed(spec), _more(engines), estimator)
    if plan is not None:
        layout = plan.layout
        return PlanInfeasible(
            f"The number of machines binds: {layout.prefill_nodes} x {layout.prefill.node.name} for prefill and "
            f"{layout.decode_nodes} x {layout.decode.node.name} for decode are needed; count_max and "
            f"search.nodes_max ({spec.search.nodes_max}) do not permit that."
        )
    return _hopeless(spec, engines, estimator)


def _hopeless(spec: Spec, engines: list[InstanceType], estimator: Estimator) -> PlanInfeasible:
    """When no number of machines is enough: how far the best gets, and which limit holds it there."""
    slo, nodes = spec.slo, spec.search.nodes_max * _RELAX
    layouts = [replace(family, prefill_nodes=nodes, decode_nodes=nodes) for family in families(spec, engines)]
    best = max(layouts, key=estimator.attainment)
    seen = estimator.estimate(best)
    return PlanInfeasible(
        f"{seen.binding} binds: {_RELAX} times the machines keep {seen.attainment:.1%} of the requests within the "
        f"SLOs, {slo.attainment:.1%} are wanted (TTFT {slo.ttft_s:g} s is met by {seen.ttft_met:.1%}, TBT "
        f"{slo.tbt_s * 1e3:g} ms by {seen.tbt_met:.1%}; {best.name})."
    )


def _cheapest(spec: Spec, engines: list[InstanceType], estimator: Estimator) -> Plan | None:
    plans = Searcher(spec, engines, estimator).solve(spec.slo.attainment, keep=1.0)
    return plans[0] if plans else None


def _relaxed(spec: Spec) -> Spec:
    nodes = tuple(node.model_copy(update={"count_max": node.count_max * _RELAX}) for node in spec.gpu_node)
    search = spec.search.model_copy(
        update={"price_per_hour_max": None, "nodes_max": spec.search.nodes_max * _RELAX}
    )
    return spec.model_copy(update={"gpu_node": nodes, "search": search})


def _more(engines: list[InstanceType]) -> list[InstanceType]:
    return [
        replace(engine, node=engine.node.model_copy(update={"count_max": engine.node.count_max * _RELAX}))
        for engine in engines
    ]
