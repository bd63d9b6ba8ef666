"""The conductor's metrics that ops and duties move; gauges.py has those that are read from the state."""

from __future__ import annotations

import itertools
from collections import Counter
from dataclasses import dataclass, field

from mooncache.conductor.core.decisions import Decision
from mooncache.conductor.core.differences import REASONS
from mooncache.conductor.core.give_ups import GiveUp, GiveUpReason
from mooncache.conductor.core.outcome import HandoverResult, Learned
from mooncache.conductor.core.policy.types import Branch
from mooncache.kvcache.instance_role import InstanceRole
from mooncache.kvcache.leg_hint import LegRole
from mooncache.runtime.metrics import Metrics, observe

_DECISION_BUCKETS_S = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25)
_ERROR_BUCKETS = (0.1, 0.25, 0.5, 0.75, 0.9, 1.1, 1.33, 2.0, 4.0, 10.0)


@dataclass(slots=True)
class Done:
    """What `mooncache status` tells, counted since the start; metrics may be switched off."""

    decisions: Counter[str] = field(default_factory=Counter)  # by reason
    role_switches: Counter[str] = field(default_factory=Counter)  # by new role
    copied_prefixes: int = 0
    trimmed_prefixes: int = 0
    trimmed_blocks: int = 0


class ConductorMetrics:
    """All metrics of one conductor."""

    def __init__(self, metrics: Metrics) -> None:
        self.done = Done()
        self._add_handovers(metrics)
        self.decisions = metrics.counter("decisions", "Scheduled requests by outcome.", ("reason",))
        self.branches = metrics.counter(
            "branches",
            "Sources of the KV of admitted prompts: local, fetch or wait, and where.",
            ("branch",),
        )
        self.planned_tokens = metrics.counter(
            "planned_tokens", "Prompt tokens of admitted requests by planned source.", ("source",)
        )
        self.observed_tokens = metrics.counter(
            "observed_tokens", "Prompt tokens by source, as engines reported them.", ("source",)
        )
        self.waits = metrics.counter(
            "in_flight_waits", "Requests that wait for blocks that another request computes."
        )
        self.pool_lookups = metrics.counter("pool_lookups", "Lookups in the pool by outcome.", ("state",))
        self.pool_seconds = metrics.histogram(
            "pool_lookup_seconds", "Time of a lookup in the pool.", buckets=_DECISION_BUCKETS_S
        )
        self.decision_seconds = metrics.histogram(
            "decision_duration_seconds",
            "Time of a decision: index, policy and record, without the pool.",
            buckets=_DECISION_BUCKETS_S,
        )
        self.ttft_ratio = metrics.histogram(
            "ttft_observed_over_predicted", "Observed over predicted TTFT.", buckets=_ERROR_BUCKETS
        )
        self.odd_costs = metrics.counter(
            "odd_costs", "Invalid costs of candidates (not finite): a cost model is broken."
        )
        self.updates = metrics.counter(
            "updates", "Reports of requests: from gateways by phase; leg_ended: from workers.", ("phase",)
        )
        self.cache_reports = metrics.counter("cache_reports", "Reports of instances' caches.", ("outcome",))
        self.expired = metrics.counter("expired_requests", "Requests whose end was never reported.")
        self.forgotten = metrics.counter("forgotten_instances", "Instances whose lease ran out.")
        self.jobs_dropped = metrics.counter("explanations_dropped", "Prompts whose keys were not recorded.")
        self.role_switches = metrics.counter(
            "role_switches", "Role switches that followed the load.", ("role",)
        )
        self.copy_orders = metrics.counter(
            "copy_orders",
            "Requests to the master to copy a prefix, or to trim its copies, by outcome.",
            ("kind", "outcome"),
        )
        self.copied_bytes = metrics.counter(
            "ordered_copy_bytes", "Upper bound of the bytes that the requested copies move."
        )
        self.trimmed_blocks = metrics.counter(
            "trimmed_block_copies", "Copies of blocks that were dropped because fewer requests read them."
        )
        self.prefetches = metrics.counter(
            "prefetches",
            "Calls that prefetch blocks of an admitted prompt from disks, by outcome.",
            ("outcome",),
        )
        self.prefetched_blocks = metrics.counter(
            "prefetched_blocks", "Blocks whose prefetch from disk was started."
        )
        self.broken_invariants = metrics.counter("broken_invariants", "Invariant checks that failed.")

        for role in InstanceRole:
            self.role_switches.labels(role)  # there from the start: a first change is growth, not a new line
        for kind in ("copy", "trim"):
            self.copy_orders.labels(kind, "ok")

    def _add_handovers(self, metrics: Metrics) -> None:
        """Whether blocks reach the leg that waits for them, and engines do what was planned."""
        self.handovers = metrics.counter(
            "handovers",
            "Prefill legs whose blocks the decode leg waited for: landed, or missed (not in the pool in time).",
            ("outcome",),
        )
        self.handovers_avoided = metrics.counter(
            "handovers_avoided",
            "Prompts computed by the decode instance because blocks of the same pair recently did not arrive.",
        )
        self.give_ups = metrics.counter(
            "give_ups",
            "Runs of blocks that will not be written: the store nodes end the waits for them. By reason and outcome.",
            ("reason", "outcome"),
        )
        self.ended_waits = metrics.counter("ended_waits", "Waits at store nodes that a give-up ended.")
        self.compared_legs = metrics.counter(
            "compared_legs", "Legs whose cache report was compared with the plan."
        )
        self.plan_differences = metrics.counter(
            "plan_differences",
            "What engines did otherwise than planned: computed, loaded or waited, and why.",
            ("leg", "kind", "reason"),
        )
        for outcome in (HandoverResult.LANDED, HandoverResult.MISSED):
            self.handovers.labels(outcome)
        for reason in GiveUpReason:
            self.give_ups.labels(reason, "ok")
        for leg, (kind, reasons) in itertools.product(LegRole, REASONS.items()):
            for why in reasons:
                self.plan_differences.labels(leg, kind, why)

    def decided(self, decision: Decision, elapsed_s: float) -> None:
        """Count a decision."""
        choice = decision.choice
        self.done.decisions[choice.reason] += 1
        self.decisions.labels(choice.reason).inc()
        observe(self.decision_seconds, elapsed_s)
        self.pool_lookups.labels(decision.pool.state).inc()
        if decision.pool.elapsed_s:
            observe(self.pool_seconds, decision.pool.elapsed_s)
        self.odd_costs.inc(choice.invalid_costs)
        if not choice.admitted:
            return
        self.branches.labels(choice.branch if decision.prefill else f"inline_{choice.branch}").inc()
        self.handovers_avoided.inc(1 if decision.avoided else 0)
        self.waits.inc(1 if choice.branch == Branch.WAIT else 0)
        source = "awaited" if choice.branch == Branch.WAIT else "pool"
        local = min(decision.local_tokens, choice.prefix_tokens)
        self.planned_tokens.labels("local").inc(local)
        self.planned_tokens.labels(source).inc(choice.prefix_tokens - local)
        self.planned_tokens.labels("computed").inc(decision.computed_tokens)

    def learned(self, phase: str, learned: Learned) -> None:
        """Count an update."""
        self.updates.labels(phase).inc()
        if learned.handover:
            self.handovers.labels(learned.handover).inc()
        if learned.ttft_error:
            self.ttft_ratio.observe(learned.ttft_error)
        self.compared_legs.inc(learned.legs_compared)
        for each in learned.differences:
            self.plan_differences.labels(each.leg, each.kind, each.reason).inc()
        self.observed_tokens.labels("local").inc(learned.local_tokens)
        self.observed_tokens.labels("pool").inc(learned.loaded_tokens)
        self.observed_tokens.labels("computed").inc(learned.computed_tokens)

    def gave_up(self, each: GiveUp, outcome: str, ended: int) -> None:
        """The store nodes were called about blocks that will not come, or could not be."""
        self.give_ups.labels(each.reason, outcome).inc()
        self.ended_waits.inc(ended)

    def prefetched(self, outcome: str, blocks: int) -> None:
        """The store nodes were called about blocks on disks, or could not be."""
        self.prefetches.labels(outcome).inc()
        self.prefetched_blocks.inc(blocks)

    def switched(self, role: InstanceRole) -> None:
        """An instance was given another role by the load."""
        self.done.role_switches[role] += 1
        self.role_switches.labels(role).inc()

    def copied(self, size_bytes: int) -> None:
        """The master took an order to copy a prefix."""
        self.done.copied_prefixes += 1
        self.copy_orders.labels("copy", "ok").inc()
        self.copied_bytes.inc(size_bytes)

    def trimmed(self, blocks: int) -> None:
        """The master dropped copies of a prefix."""
        self.done.trimmed_prefixes += 1
        self.done.trimmed_blocks += blocks
        self.copy_orders.labels("trim", "ok").inc()
        self.trimmed_blocks.inc(blocks)
