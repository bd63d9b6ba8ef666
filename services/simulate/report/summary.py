"""The figures of one run that people compare, each with the definition of services/simulate/result.py.

Idea: everything that is printed, written as JSON or plotted beside a plot comes from here, so that the table, the
page and the rows never disagree. NaN means "no request got there", never zero.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from mooncache.conductor.core.policy.fleet import BOTH, DECODE, PREFILL
from mooncache.conductor.core.policy.types import Reason
from mooncache.kvcache.instance_role import InstanceRole
from mooncache.simulate.result import Result
from mooncache.simulate.sim_request import SimBranch, SimOutcome

Floats = NDArray[np.float64]
QUANTILES = {"p50": 0.5, "p90": 0.9, "p99": 0.99}


@dataclass(frozen=True, slots=True)
class Spread:
    """Mean and quantiles of one property over the requests that have it."""

    mean: float
    p50: float
    p90: float
    p99: float
    count: int

    @classmethod
    def of(cls, values: NDArray[np.floating]) -> Spread:
        """Spread of the values that are not NaN."""
        known = values[np.isfinite(values)]
        if not known.size:
            nan = float("nan")
            return cls(nan, nan, nan, nan, 0)
        p50, p90, p99 = (float(value) for value in np.quantile(known, list(QUANTILES.values())))
        return cls(float(known.mean()), p50, p90, p99, int(known.size))


@dataclass(frozen=True, slots=True)
class Summary:
    """One run in numbers. *_share are of all requests that arrived; *_busy are shares of the instances' time."""

    policy: str
    requests: int
    outcomes: dict[str, int]
    reasons: dict[str, int]
    ttft_s: Spread
    tbt_s: Spread
    queue_s: Spread
    prefill_s: Spread
    fetch_s: Spread
    attainment: float
    ttft_within: float
    tbt_within: float
    goodput_per_s: float
    hit_ratio: float
    hits_of_unlimited: float
    fetched_ratio: float
    prefill_busy: float
    decode_busy: float
    gpu_s_per_request: float
    bytes_fetched: float
    bytes_handed_over: float
    bytes_replicated: float
    bytes_ssd: float
    wasted_prefill_s: float
    role_switches: int
    retries: int
    span_s: float
    wall_s: float
    branches: dict[str, int] = field(default_factory=dict)


def summarise(result: Result) -> Summary:
    """The figures of a run."""
    total = max(1, len(result))
    totals, instances = result.totals, result.instances
    done = result.done
    with np.errstate(invalid="ignore"):
        ttft_within = float((done & (result.ttft_s <= result.ttft_slo_s)).sum() / total)
        tbt_within = float((done & (result.tbt_s <= result.tbt_slo_s)).sum() / total)
    refused = result.outcome != 0
    reasons = np.bincount(result.reason[refused & (result.reason >= 0)], minlength=len(result.reasons))
    chosen = np.bincount(result.branch[result.branch >= 0], minlength=len(SimBranch))
    busy = busy_share(result)
    decodes = np.array([role == InstanceRole.DECODE for role in instances.role], dtype=bool)
    return Summary(
        policy=result.policy,
        requests=len(result),
        outcomes={
            name.lower(): result.count(outcome)
            for name, outcome in SimOutcome.__members__.items()
            if outcome >= 0
        },
        reasons={result.reasons[at]: int(reasons[at]) for at in np.argsort(-reasons) if reasons[at]},
        ttft_s=Spread.of(result.ttft_s[done]),
        tbt_s=Spread.of(result.tbt_s[done]),
        queue_s=Spread.of(result.queue_s[done]),
        prefill_s=Spread.of(result.prefill_s),
        fetch_s=Spread.of(result.fetch_s[result.fetched_tokens > 0]),
        attainment=result.attainment(),
        ttft_within=ttft_within,
        tbt_within=tbt_within,
        goodput_per_s=result.goodput_per_s(),
        hit_ratio=totals.hit_ratio,
        hits_of_unlimited=totals.hits_of_unlimited,
        fetched_ratio=float(result.fetched_tokens.sum()) / max(1, totals.prompt_tokens),
        prefill_busy=float(busy[~decodes].mean()) if (~decodes).any() else 0.0,
        decode_busy=float(busy[decodes].mean()) if decodes.any() else 0.0,
        gpu_s_per_request=result.prefill_gpu_s(),
        bytes_fetched=totals.bytes_fetched,
        bytes_handed_over=totals.bytes_handed_over,
        bytes_replicated=totals.bytes_replicated,
        bytes_ssd=totals.bytes_ssd,
        wasted_prefill_s=totals.wasted_prefill_s,
        role_switches=totals.role_switches,
        retries=totals.retries,
        span_s=totals.span_s,
        wall_s=totals.wall_s,
        branches={branch.name.lower(): int(chosen[branch]) for branch in SimBranch if chosen[branch]},
    )


def busy_share(result: Result) -> Floats:
    """Share of the run in which each instance computed, 0..1."""
    end_s = float(result.series.at_s[-1]) if len(result.series.at_s) else result.totals.span_s
    return np.clip(result.instances.busy_s / max(end_s, result.totals.span_s, 1e-9), 0.0, 1.0)


def windowed_hit_ratio(result: Result) -> tuple[Floats, Floats]:
    """(time in s, hit ratio of the prompts admitted since the sample before), NaN where none was."""
    series = result.series
    tokens = np.diff(series.prompt_tokens).astype(np.float64)
    with np.errstate(invalid="ignore", divide="ignore"):
        ratio = np.where(tokens > 0, np.diff(series.hit_tokens) / tokens, np.nan)
    return series.at_s[1:], ratio


def per_window(result: Result, window_s: float = 60.0) -> tuple[Floats, Floats, Floats]:
    """(middle of each window in s, arrivals per s, effective requests per s by their arrival)."""
    arrivals = result.arrival_s
    if not len(arrivals):
        return np.zeros(0), np.zeros(0), np.zeros(0)
    span_s = float(arrivals[-1])
    width_s = min(window_s, max(span_s / 10, 1e-3))
    edges = np.arange(0.0, span_s + width_s, width_s)
    arrived, _ = np.histogram(arrivals, edges)
    kept, _ = np.histogram(arrivals[result.effective()], edges)
    return (edges[:-1] + edges[1:]) / 2, arrived / width_s, kept / width_s


def pool_mean(result: Result, load: NDArray[np.float32], *, decode: bool) -> Floats:
    """Mean over the instances that have the role at each sample (both counts for either); NaN where none has."""
    role = result.series.role
    member = (role == (DECODE if decode else PREFILL)) | (role == BOTH)
    member = member & np.isfinite(load)
    count = member.sum(axis=1)
    total = np.where(member, load, 0.0).sum(axis=1, dtype=np.float64)
    with np.errstate(invalid="ignore", divide="ignore"):
        mean: Floats = np.where(count > 0, total / count, np.nan)
    return mean


def limiting(summary: Summary) -> str:
    """One sentence on what holds the cluster back, with what would help."""
    lost = 1.0 - summary.attainment
    if lost < 0.05:
        kept = (
            "Every promise is"
            if lost == 0
            else f"Both promises to {100 * summary.attainment:.1f} % of the requests are"
        )
        return f"{kept} kept, so nothing limits yet: a higher --speed shows the first bottleneck."
    refused = summary.outcomes.get("rejected", 0) + summary.outcomes.get("rejected_after_prefill", 0)
    if refused > 0.5 * lost * summary.requests:
        worst = next(iter(summary.reasons), "")
        if worst == Reason.NO_INSTANCE:
            return (
                "Requests are refused because no instance was ready for them: see events, roles and failures."
            )
        return (
            f"Requests are refused (most of them: {worst}) because they could not keep the promise: "
            "add instances or promise less."
        )
    failed = summary.outcomes.get("failed", 0)
    if failed > 0.5 * lost * summary.requests:
        worst = next(iter(summary.reasons), "")
        return (
            f"Requests fail (most of them: {worst}), whatever is promised: too_large needs instances with more memory "
            "for KV, the rest instances that stay."
        )
    if summary.ttft_within < summary.tbt_within:
        return "Prompts wait too long: more --prefill, more cache, or roles that follow the load."
    return "Tokens come too slowly: more --decode, or a looser --tbt."
