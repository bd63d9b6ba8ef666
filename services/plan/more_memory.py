"""What another size of memory would do for a captured trace: the simulator plays it at both sizes."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from mooncache.conductor.core.policy.types import AdmissionMode, Rules
from mooncache.prices.core.cost_sums import Played
from mooncache.simulate.options import SimOptions
from mooncache.simulate.run import simulate

if TYPE_CHECKING:
    from mooncache.simulate.cluster import ClusterSpec
    from mooncache.traces import Trace


def scaled(spec: ClusterSpec, factor: float) -> ClusterSpec:
    """The cluster with so many times the memory for blocks. Raises ClusterInvalid when that is too much."""
    groups = tuple(replace(group, dram_blocks=round(group.dram_blocks * factor)) for group in spec.instances)
    return replace(spec, instances=groups).check()


def memory_bytes(spec: ClusterSpec) -> float:
    """Memory for blocks of all instances, bytes."""
    return sum(
        group.count * group.dram_blocks * spec.block_tokens * spec.profile_of(group).kv_bytes_per_token
        for group in spec.instances
    )


def play(trace: Trace, spec: ClusterSpec, factor: float, seed: int) -> Played:
    """One run of the simulator with so many times the memory; equal seeds give equal results.

    No request is refused: runs that serve different requests could not be compared by what they cost.
    """
    cluster = scaled(spec, factor)
    options = SimOptions(seed=seed, rules=Rules(admission=AdmissionMode.NONE))
    totals = simulate(trace, cluster, options).totals
    return Played(factor, memory_bytes(cluster), totals.span_s, totals.hit_ratio, totals.prefill_s)
