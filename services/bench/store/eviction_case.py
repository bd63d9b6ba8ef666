"""What learnt eviction brings and what it costs: each policy in the native store, over one generated trace.

Hits are counted in a store without network, under the trace's own clock: replayed as fast as possible, chains would
look as if all users answered at once, and what `mooncache` learns is when people answer. The cost is processor time of
a client and a node together, over the network, for the same requests.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Sequence
from enum import StrEnum

from mooncache import _native
from mooncache.bench.store.metadata_cases import count_text
from mooncache.bench.store.options import StoreBenchOptions
from mooncache.bench.store.ours import OurClient, connect, start_cluster
from mooncache.bench.worker import processor_s
from mooncache.reporting.rows import Report, bar_row
from mooncache.traces import generate
from mooncache.traces.generator import conversation

Progress = Callable[[str], None]
_SEED = 7
_BLOCK_BYTES = 4096
_NODE_BYTES_MIN = 1 << 20


class EvictionPolicy(StrEnum):
    """What a store node evicts first."""

    LRU = "lru"
    TWO_QUEUES = "2q"
    LEARNT = "mooncache"


BASE_POLICY = EvictionPolicy.TWO_QUEUES


def eviction_rows(report: Report, options: StoreBenchOptions, progress: Progress) -> None:
    """Hit ratios of every policy by capacity, then processor time per request at the first capacity."""
    trace = generate(conversation(requests=options.eviction_requests), random.Random(_SEED))
    chains = [trace.blocks(request) for request in range(len(trace))]
    times_ms = [int(trace.arrival_s[request] * 1000) for request in range(len(trace))]
    asked = sum(map(len, chains))
    for capacity in options.eviction_blocks:
        hits = {}
        for policy in EvictionPolicy:
            label = f"eviction {policy}, {count_text(capacity)} blocks: hits"
            progress(label)
            hits[policy] = sum(_native.replay_chains(policy, capacity, chains, times_ms)) / asked
            report.add(
                bar_row(
                    label,
                    hits[policy],
                    "of blocks",
                    against=None if policy is EvictionPolicy.LRU else EvictionPolicy.LRU,
                    reference=None if policy is EvictionPolicy.LRU else hits[EvictionPolicy.LRU],
                    at_least=1.0 if policy is EvictionPolicy.LEARNT else None,
                )
            )
    _cost_rows(report, options, chains, progress)


def _cost_rows(
    report: Report, options: StoreBenchOptions, chains: Sequence[Sequence[int]], progress: Progress
) -> None:
    capacity = options.eviction_blocks[0]
    seconds: dict[EvictionPolicy, list[float]] = {policy: [] for policy in EvictionPolicy}
    for round_number in range(options.eviction_repeats):
        for policy in EvictionPolicy:
            progress(f"eviction: cost of {policy}, round {round_number + 1} of {options.eviction_repeats}")
            seconds[policy].append(_processor_s(policy, capacity, chains))
    medians = {policy: statistics.median(of) for policy, of in seconds.items()}
    for policy in EvictionPolicy:
        is_base = policy is BASE_POLICY
        report.add(
            bar_row(
                f"eviction {policy}: processor time of match and put",
                medians[policy] / len(chains) * 1e6,
                "us/request",
                against=None if is_base else BASE_POLICY,
                reference=None if is_base else medians[BASE_POLICY] / len(chains) * 1e6,
            )
        )


def _processor_s(policy: EvictionPolicy, capacity_blocks: int, chains: Sequence[Sequence[int]]) -> float:
    """Processor time of client and node for all chains, on a fresh node."""
    env = {
        "MOONCACHE_STORE_NODE_EVICTION": policy,
        "MOONCACHE_STORE_NODE_EXPECTED_BLOCK_BYTES": str(_BLOCK_BYTES),
    }
    capacity_bytes = max(_NODE_BYTES_MIN, capacity_blocks * _BLOCK_BYTES)
    with start_cluster(1, capacity_bytes, env) as cluster, connect(cluster, shared_memory=False) as client:
        node = cluster.parts["node-1"].pid
        before_s = time.process_time() + processor_s(node)
        for chain in chains:
            _use(client, chain)
        return time.process_time() + processor_s(node) - before_s


def _use(client: OurClient, chain: Sequence[int]) -> None:
    """Ask for a chain as an engine does, and store what was not there."""
    keys = [block.to_bytes(8, "little").ljust(32, b"\0") for block in chain]
    present = client.client.match(keys).present
    missing = [key for key, here in zip(keys, present, strict=True) if not here]
    if missing:
        # what no longer fits while the node evicts is not an error of the benchmark
        client.client.put_many(missing, [bytes(_BLOCK_BYTES)] * len(missing))
