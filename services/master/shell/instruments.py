"""The master's metrics that ops and duties move; gauges.py has those that are read from the state."""

from __future__ import annotations

from mooncache.runtime.metrics import Metrics


class MasterMetrics:
    """All metrics of one master."""

    def __init__(self, metrics: Metrics) -> None:
        self.located = metrics.counter("locate_keys", "Keys looked up with Locate.", ("result",))
        self.matched = metrics.counter(
            "match_calls", "Match calls by whether some node holds a prefix.", ("result",)
        )
        self.report_messages = metrics.counter("report_messages", "Block reports by kind.", ("kind",))
        self.report_records = metrics.counter("report_records", "Block records received in reports.")
        self.report_gaps = metrics.counter(
            "report_gaps", "Reports with a gap: changes before them are missing."
        )
        self.full_reports = metrics.counter("full_reports", "Full reports received completely.")
        self.node_deaths = metrics.counter("node_deaths", "Nodes that lost their lease.")
        self.steps = metrics.counter("task_steps", "Steps of tasks by outcome.", ("kind", "code"))
        self.copied_bytes = metrics.counter("task_copied_bytes", "Bytes that tasks copied.")
        self.trimmed = metrics.counter(
            "trimmed_copies", "Copies that were dropped because fewer replicas were needed."
        )
        self.repaired = metrics.counter(
            "repaired_blocks", "Copies that the repair asked for, by outcome.", ("code",)
        )
        self.repaired_bytes = metrics.counter("repaired_bytes", "Bytes that the repair copied.")
        self.rebalanced = metrics.counter(
            "rebalanced_blocks", "Copies that the rebalance asked for, by outcome.", ("code",)
        )
        self.rebalanced_bytes = metrics.counter("rebalanced_bytes", "Bytes that the rebalance copied.")
        self.moved = metrics.counter(
            "rebalance_dropped_copies", "Copies that were dropped because the rebalance had moved them."
        )
        self.wrong_blocks = metrics.counter(
            "wrong_blocks", "Blocks that an engine computed itself and found to be others."
        )
        self.quarantines = metrics.counter("quarantines", "Writers that were quarantined for wrong blocks.")
        self.broken_invariants = metrics.counter("broken_invariants", "Invariant checks that failed.")
