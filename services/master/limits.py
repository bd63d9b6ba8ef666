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
from mooncache.master.core.reports import ReportRules
from mooncache.master.core.task_types import TaskRules


@dataclass(frozen=True, slots=True)
class MasterLimits:
    """Limits that are not configured suit one machine and some hundred nodes.

    heartbeat_interval_s: how often nodes should send heartbeats. expire_interval_s: how often silence is looked for;
    check_interval_s: how often invariants are checked. report_bytes_max: records of one report message.
    keys_per_call_max: of every call with keys. watch_max_s, watchers_max: longest wait of one map watch, and watches at
    once. tasks_page_max: tasks of one ListTasks answer. pin_ttl_max_s: longest pin. task_interval_s: pause between two
    plans of tasks; copy_timeout_s: time for one copy call. node_call_timeout_s, node_calls_max: time for any other call
    to a node, and calls at once. tenant_quotas_bytes: by tenant name.
    """

    heartbeat_interval_s: float
    membership: MembershipRules
    placement: PlacementRules
    reports: ReportRules = field(default_factory=ReportRules)
    tasks: TaskRules = field(default_factory=TaskRules)
    expire_interval_s: float = 0.5
    check_interval_s: float = 30.0
    report_bytes_max: int = 64 << 20
    keys_per_call_max: int = 65_536
    watch_max_s: float = 30.0
    watchers_max: int = 8192
    tasks_page_max: int = 1000
    pin_ttl_max_s: float = 86_400.0
    task_interval_s: float = 0.1
    copy_timeout_s: float = 60.0
    node_call_timeout_s: float = 5.0
    node_calls_max: int = 64
    tenant_quotas_bytes: dict[str, int] = field(default_factory=dict)

    @classmethod
    def of(cls, section: MasterSection) -> Self:
        """The limits that belong to a configuration."""
        return cls(
            heartbeat_interval_s=section.heartbeat_interval_s,
            membership=MembershipRules(suspect_after_s=section.suspect_after_s, dead_after_s=section.lease_s),
            placement=PlacementRules(slow_start_s=section.slow_start_s),
        )
