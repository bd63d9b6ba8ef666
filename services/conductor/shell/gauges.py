"""Gauges of the conductor, read from its state when they are scraped."""

from __future__ import annotations

from functools import partial

from mooncache.conductor.core.registry import InstanceState
from mooncache.conductor.state import ConductorState
from mooncache.kvcache.instance_role import InstanceRole
from mooncache.runtime.metrics import Metrics


def add_gauges(metrics: Metrics, state: ConductorState) -> None:
    """Add the gauges that show `state`."""
    gauge, core = metrics.gauge, state.core
    gauge(
        "requests_active",
        "Scheduled requests that have not ended.",
        function=lambda: float(len(core.work)),
    )
    gauge("requests_in_flight", "Prompts being computed.", function=lambda: float(len(core.in_flight)))
    gauge("records", "Decisions that are kept.", function=lambda: float(len(core.records)))
    gauge("watchers", "Instance watches under way.", function=lambda: float(state.watchers))
    gauge("pool_connected", "1 when the pool can be reached.", function=lambda: float(state.pool.connected))
    gauge(
        "index_blocks",
        "Distinct blocks in instances' caches.",
        function=lambda: core.cache.stat("blocks"),
    )
    gauge("index_memory_bytes", "Memory of that index.", function=lambda: core.cache.stat("memory_bytes"))
    gauge("hot_segments", "Prefix segments whose use is counted.", function=lambda: float(len(state.hot)))
    gauge(
        "copied_segments",
        "Prefix segments that have more than one copy.",
        function=lambda: float(state.hot.copied),
    )
    gauge("seen_keys", "Keys remembered to explain misses.", function=lambda: float(core.seen.blocks()))
    instances = gauge("instances", "Known instances by state and role.", ("state", "role"))
    for name in InstanceState:
        for role in InstanceRole:
            instances.labels(name, role).set_function(partial(_count, state, name, role))


def _count(state: ConductorState, name: InstanceState, role: InstanceRole) -> float:
    return float(sum(1 for i in state.core.registry if i.state == name and i.role == role))
