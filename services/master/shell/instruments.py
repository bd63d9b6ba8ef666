"""The master's metrics: counters that ops move, gauges that are read from the state when scraped."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from mooncache.master.core.membership import NodeState
from mooncache.runtime.metrics import Metrics

if TYPE_CHECKING:
    from mooncache.master.state import MasterState


class MasterMetrics:
    """All metrics of one master."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        self.located = metrics.counter("locate_keys", "Keys asked for with Locate.", ("result",))
        self.matched = metrics.counter(
            "match_calls", "Match calls by whether some node holds a prefix.", ("result",)
        )
        self.report_messages = metrics.counter("report_messages", "Block reports by kind.", ("kind",))
        self.report_records = metrics.counter("report_records", "Block records received in reports.")
        self.report_gaps = metrics.counter("report_gaps", "Reports that showed that changes were missing.")
        self.full_reports = metrics.counter("full_reports", "Full reports taken in completely.")
        self.node_deaths = metrics.counter("node_deaths", "Nodes that lost their lease.")
        self.steps = metrics.counter("task_steps", "Steps of tasks by outcome.", ("kind", "code"))
        self.copied_bytes = metrics.counter("task_copied_bytes", "Bytes that tasks copied.")
        self.trimmed = metrics.counter(
            "trimmed_copies", "Copies that were dropped because fewer were wanted."
        )
        self.broken_invariants = metrics.counter("broken_invariants", "Invariant checks that failed.")

    def watch(self, state: MasterState) -> None:
        """Add the gauges that show `state`."""
        gauge = self._metrics.gauge
        gauge("leading", "1 when this master leads.", function=lambda: float(state.leading))
        gauge("term", "Fencing term of this master.", function=lambda: float(state.membership.term))
        gauge("epoch", "Epoch of the cluster map.", function=lambda: float(state.membership.epoch))
        gauge("watchers", "Map watches under way.", function=lambda: float(state.watchers))
        gauge(
            "directory_complete",
            "Share of living nodes whose full report is in.",
            function=state.completeness,
        )
        gauge("tasks_active", "Tasks that are not over.", function=lambda: float(state.tasks.active_count))
        gauge(
            "task_steps_in_flight", "Copies under way.", function=lambda: float(state.tasks.steps_in_flight)
        )
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
        nodes = gauge("nodes", "Known nodes by state.", ("state",))
        for node_state in NodeState:
            nodes.labels(node_state.value).set_function(partial(_count, state, node_state))


def _count(state: MasterState, wanted: NodeState) -> float:
    return float(state.membership.count_by_state()[wanted])
