"""The master's limits: what the configuration's section `master` sets, and what only tests turn.

What a user can set has its default and its check in the configuration alone; every other rule has its default where it
is used. `MasterLimits.of` is the one place where section and rules meet.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Self

from mooncache.config import MasterSection
from mooncache.master.core.membership import MembershipRules
from mooncache.master.core.placement import PlacementRules
from mooncache.master.core.rebalance_types import RebalanceRules
from mooncache.master.core.repair_types import RepairRules
from mooncache.master.core.reports import ReportRules
from mooncache.master.core.task_types import TaskRules


@dataclass(frozen=True, slots=True)
class MasterLimits:
    """Limits that are not configured suit one machine and some hundred nodes."""

    heartbeat_interval_s: float  # how often nodes send heartbeats
    membership: MembershipRules
    placement: PlacementRules
    repair: RepairRules
    rebalance: RebalanceRules
    reports: ReportRules = field(default_factory=ReportRules)
    tasks: TaskRules = field(default_factory=TaskRules)
    expire_interval_s: float = 0.5  # how often silent nodes are looked for
    check_interval_s: float = 30.0  # how often invariants are checked
    report_bytes_max: int = 64 << 20  # records of one report message
    keys_per_call_max: int = 65_536  # most keys of any one call
    watch_max_s: float = 30.0  # longest wait of one map watch
    watchers_max: int = 8192  # map watches at once
    tasks_page_max: int = 1000  # tasks of one ListTasks answer
    pin_ttl_max_s: float = 86_400.0  # longest pin
    task_interval_s: float = 0.1  # pause between two plans of tasks
    copy_timeout_s: float = 60.0  # time for one copy call
    node_call_timeout_s: float = 5.0  # time for any other call to a node
    node_calls_max: int = 64  # calls to nodes at once
    quarantine_alone_max: int = 1  # see core/accusations.py
    tenant_quotas_bytes: dict[str, int] = field(default_factory=dict)  # by tenant name

    @classmethod
    def of(cls, section: MasterSection) -> Self:
        """The limits that belong to a configuration."""
        return cls(
            heartbeat_interval_s=section.heartbeat_interval_s,
            membership=MembershipRules(suspect_after_s=section.suspect_after_s, dead_after_s=section.lease_s),
            placement=PlacementRules(slow_start_s=section.slow_start_s),
            repair=RepairRules(
                bytes_per_s=section.repair_bytes_per_s,
                grace_s=section.repair_grace_s,
                replicas=section.replicas,
            ),
            rebalance=RebalanceRules(
                bytes_per_s=section.rebalance_bytes_per_s,
                settle_s=section.repair_grace_s,
                lag_s=2 * section.heartbeat_interval_s + 1.0,
            ),
            quarantine_alone_max=section.quarantine_alone_max,
        )
