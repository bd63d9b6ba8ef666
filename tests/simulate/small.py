"""Small traces and clusters for tests of whole runs."""

from __future__ import annotations

import random
from dataclasses import fields
from typing import Any

import numpy as np

from mooncache.conductor.core.policy.types import AdmissionMode, Rules
from mooncache.simulate import ClusterSpec, InstanceGroup, Result, SimOptions, simulate
from mooncache.traces import Trace

OPEN = Rules(admission=AdmissionMode.NONE, holds=True, pipelines=True)


def trace_of(rows: list[tuple[float, int, int, list[int]]]) -> Trace:
    """A trace of (arrival s, prompt tokens, answer tokens, block ids)."""
    rows = sorted(rows, key=lambda row: row[0])
    return Trace(
        arrival_s=np.array([row[0] for row in rows], dtype=np.float64),
        input_tokens=np.array([row[1] for row in rows], dtype=np.int32),
        output_tokens=np.array([row[2] for row in rows], dtype=np.int32),
        offsets=np.cumsum([0, *(len(row[3]) for row in rows)], dtype=np.int64),
        hash_ids=np.array([block for row in rows for block in row[3]], dtype=np.int64),
    )


def conversations(count: int, rate_per_s: float, seed: int, blocks_max: int = 30) -> Trace:
    """Conversations whose turns repeat what came before; all share block 0."""
    rng = random.Random(seed)
    now_s, fresh = 0.0, 1
    open_chains: list[list[int]] = []
    rows: list[tuple[float, int, int, list[int]]] = []
    for _ in range(count):
        now_s += rng.expovariate(rate_per_s)
        chain = list(rng.choice(open_chains)) if open_chains and rng.random() < 0.5 else [0]
        more = rng.randint(1, max(1, blocks_max // 3))
        chain += range(fresh, fresh + more)
        fresh += more
        open_chains.append(chain)
        tokens = len(chain) * 512 - rng.randint(0, 511)
        rows.append((now_s, tokens, rng.randint(1, 200), chain[: -(-tokens // 512)]))
    return trace_of(rows)


def cluster(prefill: int = 3, decode: int = 2, dram_blocks: int = 300, **changes: Any) -> ClusterSpec:
    """A small cluster; `changes` are of the spec, and of its groups where they are called group_*."""
    group = {
        key.removeprefix("group_"): changes.pop(key) for key in list(changes) if key.startswith("group_")
    }
    groups = (
        InstanceGroup("prefill", prefill, dram_blocks=dram_blocks, **group),
        InstanceGroup(
            "decode", decode, dram_blocks=0, **{k: v for k, v in group.items() if k != "pipeline_size"}
        ),
    )
    return ClusterSpec(instances=tuple(g for g in groups if g.count), **changes)


def run(trace: Trace, spec: ClusterSpec, policy: str = "algorithm1", **options: Any) -> Result:
    """Simulate without admission, unless `rules` say otherwise."""
    return simulate(trace, spec, SimOptions(policy=policy, **{"rules": OPEN, **options}))


def columns(result: Result) -> dict[str, Any]:
    """Everything of a result that has to be equal in equal runs."""
    values = {field.name: getattr(result, field.name) for field in fields(result)}
    return {name: value for name, value in values.items() if isinstance(value, np.ndarray)}
