"""One simulated run, described by values and summed up in values: what scenarios compare.

A `Run` says everything that may differ between runs; all else is setting.py. A `RunSummary` is small enough to come
back from another process. Both are plain data, so equal runs are simulated once (lab.py).
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from mooncache.conductor.core.policy.types import AdmissionMode, Rules
from mooncache.kvcache.instance_role import InstanceRole
from mooncache.reproduce import setting
from mooncache.reproduce.workloads import CONVERSATION, Sources, load
from mooncache.simulate.cluster import ClusterSpec, InstanceGroup, PoolScope, RoleSwitching, Slo
from mooncache.simulate.options import SimOptions
from mooncache.simulate.result import Result
from mooncache.simulate.run import simulate
from mooncache.simulate.sim_request import SimOutcome
from mooncache.traces import Trace, TracePart

LIMITS_S: Final = (0.05, 0.07, 0.1, 0.15, 0.2, 0.25, 0.3, 0.4, 0.5, 1.0)


@dataclass(frozen=True, slots=True)
class Run:
    """A workload on a cluster under a policy."""

    workload: str = CONVERSATION
    policy: str = setting.PAPERS_POLICY
    admission: AdmissionMode = AdmissionMode.NONE  # NONE: all requests are served
    speed: float = setting.SPEED
    prefill: int = setting.PREFILL_NODES
    decode: int = setting.DECODE_NODES
    part: TracePart = TracePart.WHOLE  # the half of the trace (by time) that is played, from empty caches on
    pool: PoolScope = PoolScope.GLOBAL
    pool_blocks: int = setting.POOL_BLOCKS_PER_NODE
    eviction: str = "lru"
    network_gbps: float = setting.NODE_NETWORK_GBPS
    outputs: int = 0  # 0: as in the trace
    roles: bool = False
    """Whether nodes may change between prefill and decode while it runs. The DRAM of a decode node joins the pool when
    it becomes a prefill node."""
    threshold: float = setting.THRESHOLD
    ttft_slo_s: float = setting.TTFT_SLO_S
    tbt_slo_s: float = setting.TBT_SLO_S

    def at(self, speed: float) -> Run:
        """The same run, so many times as fast as the trace."""
        return dataclasses.replace(self, speed=speed)


@dataclass(frozen=True, slots=True)
class Latency:
    """Mean, median, ninetieth and ninety-ninth percentile of the requests that were served, seconds."""

    mean: float
    p50: float
    p90: float
    p99: float


@dataclass(frozen=True, slots=True)
class RunSummary:
    """What is compared. Shares are of all requests of the run, refused ones included; fetched_tokens is a mean."""

    requests: int
    attained: float
    ttft: Latency
    tbt: Latency
    tbt_mean_s: float
    within_tbt: tuple[float, ...]
    refused: int
    refused_after_prefill: int
    hit_ratio: float
    prefill_gpu_s: float
    fetched_tokens: float
    load: tuple[float, float, float, float]
    load_correlation: float
    copies: tuple[tuple[int, tuple[int, ...]], ...]
    copies_at_s: tuple[float, ...]
    wall_s: float


def simulated(sources: Sources, run: Run) -> RunSummary:
    """Simulate one run."""
    return summed_up(play(sources, run))


def play(sources: Sources, run: Run) -> Result:
    """Simulate one run and return everything that is known of it."""
    cluster = ClusterSpec(
        instances=(
            _group(run, InstanceRole.PREFILL, run.prefill),
            _group(run, InstanceRole.DECODE, run.decode),
        ),
        name=f"{run.prefill}P+{run.decode}D",
        profile=setting.PROFILE,
        pool=run.pool,
        first_token=setting.FIRST_TOKEN,
        slo=Slo(run.ttft_slo_s, run.tbt_slo_s),
        roles=RoleSwitching(enabled=run.roles),
    )
    # The papers' decode nodes hold newcomers, and their prefill nodes work together; ours do neither.
    rules = Rules(admission=run.admission, threshold=run.threshold, holds=True, pipelines=True)
    options = SimOptions(policy=run.policy, rules=rules, seed=setting.SEED, spread_tick_s=0.0)
    return simulate(requests(sources, run), cluster, options)


def requests(sources: Sources, run: Run) -> Trace:
    """The requests of a run: its workload, half, outputs and speed."""
    trace = load(sources, run.workload).part(run.part)
    if run.outputs:
        trace = trace.with_outputs(run.outputs)
    return trace if run.speed == 1.0 else trace.speed(run.speed)


def _group(run: Run, role: InstanceRole, count: int) -> InstanceGroup:
    return InstanceGroup(
        role,
        count,
        dram_blocks=run.pool_blocks if role is InstanceRole.PREFILL or run.roles else 0,
        keep_handover=role is InstanceRole.PREFILL,
        nic_in_gbps=run.network_gbps,
        nic_out_gbps=run.network_gbps,
        nic_efficiency=1.0,
        eviction=run.eviction,
        sequences_max=setting.SEQUENCES_MAX,
    )


def summed_up(result: Result) -> RunSummary:
    """The summary of a result."""
    prefill, decode = _loads(result)
    series = result.series
    ranks = zip(series.watched_rank, range(len(series.watched)), strict=False)
    return RunSummary(
        requests=len(result),
        attained=result.attainment(),
        ttft=latency(result.ttft_s),
        tbt=latency(result.tbt_s),
        tbt_mean_s=float(np.nanmean(result.tbt_mean_s)) if np.isfinite(result.tbt_mean_s).any() else math.nan,
        within_tbt=tuple(result.attainment(None, limit) for limit in LIMITS_S),
        refused=result.count(SimOutcome.REJECTED),
        refused_after_prefill=result.count(SimOutcome.REJECTED_AFTER_PREFILL),
        hit_ratio=result.totals.hit_ratio,
        prefill_gpu_s=result.prefill_gpu_s(),
        fetched_tokens=float(result.fetched_tokens.mean()) if len(result) else 0.0,
        load=(float(prefill.mean()), float(prefill.std()), float(decode.mean()), float(decode.std())),
        load_correlation=correlation(prefill, decode),
        copies=tuple((rank, tuple(series.replicas[:, column].tolist())) for rank, column in ranks),
        copies_at_s=tuple(series.at_s.tolist()),
        wall_s=result.totals.wall_s,
    )


def latency(seconds: NDArray[np.float64]) -> Latency:
    """Mean and quantiles of those that have a value; NaN when none has."""
    got = seconds[np.isfinite(seconds)]
    if not len(got):
        return Latency(math.nan, math.nan, math.nan, math.nan)
    return Latency(float(got.mean()), *(float(q) for q in np.quantile(got, (0.5, 0.9, 0.99))))


def _loads(result: Result) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Mean load of the prefill and of the decode instances at each sample while requests arrive.

    The first tenth is left out: there both loads rise together from an empty cluster.
    """
    series = result.series
    first_s, last_s = (result.arrival_s[0], result.arrival_s[-1]) if len(result) else (0.0, 0.0)
    arriving = (series.at_s <= last_s) & (series.at_s >= first_s + 0.1 * (last_s - first_s))
    if not arriving.any():
        return np.zeros(1), np.zeros(1)
    roles = np.array(result.instances.role)
    prefill = series.prefill_load[arriving][:, roles == InstanceRole.PREFILL]
    decode = series.decode_load[arriving][:, roles == InstanceRole.DECODE]
    return prefill.mean(axis=1, dtype=np.float64), decode.mean(axis=1, dtype=np.float64)


def correlation(one: NDArray[np.float64], other: NDArray[np.float64]) -> float:
    """Correlation without lag; 0 when one of them does not change."""
    if len(one) < 3 or one.std() == 0 or other.std() == 0:
        return 0.0
    return float(np.corrcoef(one, other)[0, 1])


@dataclass(frozen=True, slots=True)
class SpeedSearch:
    """For the highest speed of `run` at which `share` of the requests keep both promises, within `precision`."""

    run: Run
    share: float = setting.CAPACITY_SHARE
    lowest: float = 0.125
    highest: float = 16.0
    precision: float = 0.05


def capacity(sources: Sources, search: SpeedSearch) -> float:
    """Bisection on the logarithm of the speed; 0 when even the lowest speed is too fast.

    The share need not fall monotonically with the speed; the answer is a speed that keeps the share and has one
    that does not within `precision` above it.
    """

    def kept(speed: float) -> bool:
        return summed_up(play(sources, search.run.at(speed))).attained >= search.share

    low, high = 1.5, 2.25
    if kept(low):
        highest = 2.0 if sources.first else search.highest
        while high < highest and kept(high):
            low, high = high, high * 1.5
    else:
        high, low = low, low / 1.5
        while not kept(low):
            high, low = low, low / 1.5
            if low < search.lowest:
                return 0.0
    precision = max(search.precision, 0.25) if sources.first else search.precision
    while high / low > 1 + precision:
        middle = math.sqrt(low * high)
        low, high = (middle, high) if kept(middle) else (low, middle)
    return low
