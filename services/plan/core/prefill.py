"""Time to the first token: prompts queue for prefill instances, first come first served, and fetch what is cached.

The queue is Lindley's recursion for many servers (Kiefer and Wolfowitz, 1955) over the trace's own arrivals, so bursts
and the mix of lengths are what they are, without an assumption about distributions. Waits are monotone on every path:
more instances, shorter computing or later arrivals never make a request wait longer. The network is a processor-sharing
queue: a transfer takes its time alone divided by the share that is free.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass

import numpy as np

from mooncache.plan.core.machine import Floats, InstanceType


def waits_s(arrival_s: Floats, service_s: Floats, servers: int) -> Floats:
    """Waiting time of each customer in front of `servers` equal servers, first come first served."""
    if servers >= len(arrival_s):
        return np.zeros(len(arrival_s))
    free = [float("-inf")] * servers
    waits = []
    replace = heapq.heapreplace
    for arrival, service in zip(arrival_s.tolist(), service_s.tolist(), strict=True):
        start = max(arrival, free[0])
        replace(free, start + service)
        waits.append(start - arrival)
    return np.asarray(waits)


@dataclass(frozen=True, slots=True)
class PoolCosts:
    """What the pool costs on the way: bytes of one token, bytes/s of one machine's network and disks."""

    kv_bytes_per_token: float
    nic_bytes_per_s: float
    ssd_bytes_per_s: float


@dataclass(frozen=True, slots=True)
class FirstTokens:
    """Times to the first token and cached tokens that are used, and how busy the shared parts are (1 is all of it)."""

    ttft_s: Floats
    cached: Floats
    computing: float
    network: float
    disks: float


def loads(
    network: PoolCosts,
    cached: Floats,
    on_disk: Floats,
    tokens: Floats,
    span_s: float,
    nodes: int,
    pool_nodes: int,
) -> tuple[float, float]:
    """Mean use of a prefill machine's network (out: every prompt's KV; in: what is cached) and of the pool's disks."""
    out_bytes = float(tokens.sum() + cached.sum()) * network.kv_bytes_per_token
    nic = out_bytes / (span_s * nodes * network.nic_bytes_per_s)
    disk_bytes = float(on_disk.sum()) * network.kv_bytes_per_token
    disks = disk_bytes / (span_s * pool_nodes * network.ssd_bytes_per_s) if disk_bytes else 0.0
    return nic, disks


def fetches_s(
    network: PoolCosts, cached: Floats, on_disk: Floats, nic_load: float, disk_load: float
) -> Floats:
    """Seconds to fetch the cached part of each prompt; infinite when the network or the disks are overloaded."""
    nic_share, disk_share = 1 - nic_load, 1 - disk_load
    if nic_share <= 0:
        return np.where(cached > 0, np.inf, 0.0)
    over_network = cached * network.kv_bytes_per_token / (network.nic_bytes_per_s * nic_share)
    if not on_disk.any():
        return over_network
    if disk_share <= 0:
        return np.where(on_disk > 0, np.inf, over_network)
    from_disk = on_disk * network.kv_bytes_per_token / (network.ssd_bytes_per_s * disk_share)
    return np.maximum(over_network, from_disk)


def joining_s(
    network: PoolCosts, decode: InstanceType, tokens: Floats, compute_s: Floats, nic_load: float
) -> Floats:
    """Seconds from the computed prompt to the first token, which the decode instance sends.

    KV is handed over layer by layer while the prompt is computed, so only what takes longer than that is left; then
    it is loaded onto the GPUs and one step is made.
    """
    size = tokens * network.kv_bytes_per_token
    handover = size / (network.nic_bytes_per_s * max(1 - nic_load, 1e-3))
    return np.maximum(handover - compute_s, 0.0) + size / decode.load_bytes_per_s + decode.step_base_s


def compute_s(engine: InstanceType, tokens: Floats, cached: Floats, stages: int) -> tuple[Floats, Floats]:
    """(seconds an instance is busy, seconds until the first token) of every prompt.

    A pipeline takes the work of one prompt off one instance but not off the instances together, so queues are those
    of single instances and only the way through is shorter.
    """
    alone = engine.prefill_s(tokens, cached)
    return alone, engine.pipelined_s(tokens, cached, stages) if stages > 1 else alone


def slow_fetch(network: PoolCosts, first: FirstTokens, compute_s_per_token: float) -> bool:
    """Whether fetching a token takes longer than computing it, so that less of the pool may be better."""
    kv = network.kv_bytes_per_token
    over_network = kv / (network.nic_bytes_per_s * max(1 - first.network, 1e-9))
    from_disk = kv / (network.ssd_bytes_per_s * max(1 - first.disks, 1e-9)) if first.disks else 0.0
    return max(over_network, from_disk) > compute_s_per_token
