"""The simulator's word on a layout: the layout as a cluster, runs over seeds and halves of the trace.

An instance of the simulator has a whole node for itself; where machines hold several instances, each gets its share
of memory, disks and network.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Final

import numpy as np

from mooncache.conductor.core.policy.types import DecodeCost, PrefillCost, Rules
from mooncache.kvcache.instance_role import InstanceRole
from mooncache.plan.core.certainty import SimulatedRun
from mooncache.plan.core.estimate import Layout
from mooncache.plan.core.machine import Floats, InstanceType
from mooncache.plan.core.spec import GB, Arrangement, SloSpec
from mooncache.simulate.cluster import ClusterSpec, FirstToken, InlineMode, InstanceGroup, RoleSwitching, Slo
from mooncache.simulate.options import SimOptions
from mooncache.simulate.profile import ModelProfile
from mooncache.simulate.result import Result
from mooncache.simulate.run import simulate
from mooncache.traces import Trace, TracePart

NOISE: Final = 0.05  # relative deviation of computing times: what makes seeds differ
POLICY: Final = "mooncache"
CheckProgress = Callable[[float], None]


def profile_of(engine: InstanceType, base: ModelProfile, memory_share: float) -> ModelProfile:
    """The profile of one instance on its hardware; `base` is what it was scaled from."""
    node = engine.node
    loading = node.host_gb_per_s / engine.per_node * GB
    # The simulator counts with a fixed share of memory; another share is the same KV in other words.
    usable = engine.kv_capacity_tokens * engine.kv_bytes_per_token + base.weights_bytes
    return replace(
        base,
        name=base.name if engine.measured else f"{base.name} on {engine.name}",
        prefill=PrefillCost(*engine.prefill),
        decode=DecodeCost(engine.step_base_s, engine.step_per_sequence_s, engine.step_per_token_s),
        gpus=engine.gpus,
        gpu_tflops=node.gpu_tflops,
        gpu_memory_bytes=usable / engine.gpus / memory_share,
        gpu_memory_bytes_per_s=node.gpu_memory_gb_per_s * GB,
        host_to_device_bytes_per_s=loading,
        load_bytes_per_s=engine.load_bytes_per_s,
    )


def cluster_of(
    layout: Layout, bases: dict[str, ModelProfile], slo: SloSpec, block_tokens: int
) -> ClusterSpec:
    """A layout as the simulator takes it. bases: the profile of each machine type, by its name."""
    prefill, decode = layout.prefill_instances, layout.decode_instances
    parts = [(InstanceRole.PREFILL, layout.prefill, prefill), (InstanceRole.DECODE, layout.decode, decode)]
    if layout.arrangement is Arrangement.BOTH:
        parts = [(InstanceRole.BOTH, layout.prefill, prefill + decode)]
    return ClusterSpec(
        instances=tuple(
            _group(role, engine, count, layout, bases[engine.node.name], block_tokens)
            for role, engine, count in parts
        ),
        name=f"{prefill + decode} both"
        if layout.arrangement is Arrangement.BOTH
        else f"{prefill}P+{decode}D",
        profile=bases[layout.prefill.node.name],
        block_tokens=block_tokens,
        first_token=FirstToken.DECODE,
        slo=Slo(slo.ttft_s, slo.tbt_s),
        roles=RoleSwitching(enabled=layout.arrangement is Arrangement.SWITCHING),
    )


def _group(
    role: InstanceRole,
    engine: InstanceType,
    count: int,
    layout: Layout,
    base: ModelProfile,
    block_tokens: int,
) -> InstanceGroup:
    share = 1 / engine.per_node
    block_bytes = block_tokens * engine.kv_bytes_per_token
    profile = profile_of(engine, base, 0.9)
    group = InstanceGroup(
        role=role,
        count=count,
        dram_blocks=math.floor(layout.dram.gb * GB * share / block_bytes),
        ssd_blocks=math.floor(layout.ssd.gb * GB * share / block_bytes),
        nic_in_gbps=layout.nic.gbps * share,
        nic_out_gbps=layout.nic.gbps * share,
        nic_efficiency=layout.nic.efficiency,
        inline=InlineMode.CHUNKED if role is InstanceRole.BOTH else InlineMode.WHOLE,  # as engines do it
        pipeline_size=layout.stages if role is InstanceRole.PREFILL else 1,
        profile=None if profile == base else profile,
    )
    if not layout.ssd.gb:
        return group
    return replace(
        group,
        ssd_read_gbytes_per_s=layout.ssd.read_gb_per_s * share,
        ssd_write_gbytes_per_s=layout.ssd.write_gb_per_s * share,
    )


def run(
    trace: Trace,
    cluster: ClusterSpec,
    slo: SloSpec,
    seed: int,
    part: TracePart = TracePart.WHOLE,
    on_progress: CheckProgress | None = None,
) -> tuple[SimulatedRun, Result]:
    """One simulation. `on_progress` gets the share that is done."""
    options = SimOptions(policy=POLICY, rules=Rules(pipelines=True), seed=seed, noise=NOISE)

    def progress(arrived: int, count: int, _now_s: float) -> None:
        if on_progress is not None:
            on_progress(arrived / max(count, 1))

    result = simulate(trace, cluster, options, progress)
    return run_of(result, slo, part, seed), result


def run_of(result: Result, slo: SloSpec, part: TracePart, seed: int) -> SimulatedRun:
    """A result as the plan reads it; requests that were refused count as infinitely late."""
    done = result.done
    ttft = np.where(done, result.ttft_s, np.inf)
    tbt = np.where(done, result.tbt_s, np.inf)
    served_ttft, served_tbt = ttft[done], tbt[done]
    return SimulatedRun(
        part=part,
        seed=seed,
        attainment=result.attainment(),
        ttft_mean_s=_of(served_ttft, np.mean),
        ttft_p90_s=_of(served_ttft, lambda values: np.quantile(values, 0.9)),
        ttft_p99_s=_of(served_ttft, lambda values: np.quantile(values, 0.99)),
        ttft_at_target_s=_of(ttft, lambda values: np.quantile(values, slo.attainment, method="higher")),
        tbt_mean_s=_of(served_tbt, np.mean),
        tbt_p90_s=_of(served_tbt, lambda values: np.quantile(values, 0.9)),
        tbt_at_target_s=_of(tbt, lambda values: np.quantile(values, slo.attainment, method="higher")),
        hit_ratio=result.totals.hit_ratio,
        goodput_per_s=result.goodput_per_s(),
        refused=(result.rejected + result.failed) / max(len(result), 1),
        wall_s=result.totals.wall_s,
    )


def _of(values: Floats, what: Callable[[Floats], Any]) -> float:
    return float(what(values)) if len(values) else float("inf")
