"""Small questions and workloads for tests of the planner."""

from __future__ import annotations

import random
from typing import Any

import numpy as np

from mooncache.plan import loading, workload
from mooncache.plan.core import machine
from mooncache.plan.core.estimate import Demand, Estimator
from mooncache.plan.core.search import Searcher
from mooncache.plan.core.spec import SearchSpec, SloSpec, Spec
from mooncache.prices.core.hardware import Dram, GpuNode, Nic, Ssd
from mooncache.traces import GenerateOptions, Trace, generate

BLOCK_TOKENS = 512


def node(name: str = "A800", **changes: Any) -> GpuNode:
    values: dict[str, Any] = {
        "name": name,
        "gpus": 8,
        "gpu_memory_gb": 80,
        "gpu_memory_gb_per_s": 2040,
        "gpu_tflops": 312,
        "host_gb_per_s": 128,
        "price_per_hour": 10.0,
        "count_max": 4,
    }
    return GpuNode(**{**values, **changes})


def spec(**changes: Any) -> Spec:
    values: dict[str, Any] = {
        "gpu_node": (node(),),
        "dram": (Dram(gb=500, price_per_hour=0.5),),
        "ssd": (Ssd(gb=0),),
        "nic": (Nic(gbps=400, price_per_hour=0.4),),
        "search": SearchSpec(pipeline_stages=(1,), nodes_max=8),
        "slo": SloSpec(ttft_s=15, tbt_s=0.1, attainment=0.9),
    }
    return Spec(**{**values, **changes})


def trace(requests: int = 120, rate_per_s: float = 2.0, seed: int = 1) -> Trace:
    return generate(
        GenerateOptions(requests=requests, rate_per_s=rate_per_s, tick_s=0.0), random.Random(seed)
    )


def demand(requests: int = 120, rate_per_s: float = 2.0, seed: int = 1) -> Demand:
    return workload.demand_of(trace(requests, rate_per_s, seed))


def searcher(question: Spec, load: Demand) -> Searcher:
    measured = loading.measured(question)
    engines = machine.engines(
        measured, question.gpu_node, question.search.gpus_per_instance, question.model.memory_share
    )
    block_bytes = BLOCK_TOKENS * next(iter(measured.values())).kv_bytes_per_token
    return Searcher(question, engines, Estimator(load, question.slo, block_bytes))


def best_cost(question: Spec, load: Demand) -> float:
    """Cost of the best plan; infinite when there is none."""
    plans = searcher(question, load).solve(question.slo.attainment, keep=1.0)
    return plans[0].cost_per_hour if plans else float("inf")


def floats(values: list[float]) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    return np.asarray(values, dtype=np.float64)
