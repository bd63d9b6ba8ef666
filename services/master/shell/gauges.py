"""Gauges of the master, read from its state when they are scraped."""

from __future__ import annotations

from functools import partial

from mooncache.master.core.membership import NodeState
from mooncache.master.state import MasterState
from mooncache.runtime.metrics import Metrics


def add_gauges(metrics: Metrics, state: MasterState) -> None:
    """Add the gauges that show `state`."""
    gauge = metrics.gauge
    gauge("leading", "1 when this master leads.", function=lambda: float(state.leading))
    gauge("term", "Fencing term of this master.", function=lambda: float(state.membership.term))
    gauge("epoch", "Epoch of the cluster map.", function=lambda: float(state.membership.epoch))
    gauge("watchers", "Map watches under way.", function=lambda: float(state.watchers))
    gauge(
        "directory_complete",
        "Share of live nodes whose full report has arrived.",
        function=state.completeness,
    )
    gauge("tasks_active", "Tasks that have not ended.", function=lambda: float(state.tasks.active_count))
    gauge("task_steps_in_flight", "Copies under way.", function=lambda: float(state.tasks.steps_in_flight))
    gauge(
        "directory_blocks",
        "Distinct blocks in the directory.",
        function=lambda: state.index_stat("blocks"),
    )
    gauge(
        "directory_memory_bytes",
        "Memory of the directory.",
        function=lambda: state.index_stat("memory_bytes"),
    )
    gauge(
        "directory_held_bytes",
        "Bytes of all copies in the directory.",
        function=lambda: float(sum(used for used, _ in state.directory.tenant_usage().values())),
    )
    gauge(
        "repair_short_blocks",
        "Blocks with fewer copies than wanted.",
        function=lambda: float(state.repair.figures(state.clock.now_s()).short_blocks),
    )
    gauge(
        "repair_close_blocks",
        "Blocks whose copies are in fewer failure domains than they could be.",
        function=lambda: float(state.repair.figures(state.clock.now_s()).close_blocks),
    )
    gauge(
        "repair_left_bytes",
        "Bytes of the copies that the repair has yet to make.",
        function=lambda: float(state.repair.figures(state.clock.now_s()).left_bytes),
    )
    gauge(
        "repair_resting_blocks",
        "Blocks that the repair could not copy and tries again later.",
        function=lambda: float(state.repair.figures(state.clock.now_s()).resting_blocks),
    )
    gauge(
        "rebalance_left_bytes",
        "Bytes that the rebalance has yet to move.",
        function=lambda: float(state.rebalance.figures(state.clock.now_s()).left_bytes),
    )
    nodes = gauge("nodes", "Known nodes by state.", ("state",))
    for node_state in NodeState:
        nodes.labels(node_state.value).set_function(partial(_count, state, node_state))


def _count(state: MasterState, wanted: NodeState) -> float:
    return float(state.membership.count_by_state()[wanted])
