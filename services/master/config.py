"""The master's limits: what the configuration's section `master` sets, and what only tests and experts turn.

Units are the end of each name. `MasterConfig.of` is the one place where section and limits meet.
"""

from __future__ import annotations

from typing import Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from mooncache.config import MasterSection
from mooncache.master.core.membership import MembershipRules
from mooncache.master.core.placement import PlacementRules
from mooncache.master.core.reports import ReportRules
from mooncache.master.core.task_types import TaskRules


class MasterConfig(BaseModel):
    """Every limit has a default that suits one machine and some hundred nodes."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    heartbeat_interval_s: float = Field(default=1.0, gt=0)
    """How often nodes should send heartbeats."""
    suspect_after_s: float = Field(default=3.0, gt=0)
    """Silence after which a node gets no new blocks."""
    dead_after_s: float = Field(default=10.0, gt=0)
    """Silence after which a node counts as dead."""
    forget_after_s: float = Field(default=3600.0, gt=0)
    """Silence after which a dead node is forgotten."""
    nodes_max: int = Field(default=4096, gt=0, lt=65536)
    """Nodes that may register."""
    refresh_interval_s: float = Field(default=1.0, ge=0)
    """Least time between maps that only move free bytes."""
    free_change_share: float = Field(default=0.05, ge=0, le=1)
    """Share of capacity worth a new map."""
    expire_interval_s: float = Field(default=0.5, gt=0)
    """How often silence is looked for."""
    check_interval_s: float = Field(default=30.0, gt=0)
    """How often invariants are checked when idle."""

    slow_start_s: float = Field(default=30.0, ge=0)
    """Time in which an empty node ramps to its full weight."""
    slow_start_floor: float = Field(default=0.125, gt=0, le=1)
    """Share of its weight it begins with."""
    slow_start_fill: float = Field(default=0.25, gt=0, le=1)
    """Share of capacity in use that ends the ramp."""

    report_buffer_bytes_max: int = Field(default=16 << 20, gt=0)
    """Changes waiting for a full report, per node."""
    report_bytes_max: int = Field(default=64 << 20, gt=0)
    """Records of one report message."""
    report_parts_max: int = Field(default=65536, gt=0)
    """Parts of one full report."""
    report_timeout_s: float = Field(default=15.0, gt=0)
    """Silence after which a full report is given up."""

    keys_per_call_max: int = Field(default=65536, gt=0)
    """Keys of one call."""
    watch_max_s: float = Field(default=30.0, gt=0)
    """Longest wait of one map watch."""
    watchers_max: int = Field(default=8192, gt=0)
    """Map watches at once."""
    tasks_page_max: int = Field(default=1000, gt=0)
    """Tasks of one ListTasks answer."""
    pin_ttl_max_s: float = Field(default=86400.0, gt=0)
    """Longest pin."""

    tasks_active_max: int = Field(default=64, gt=0)
    """Tasks that are not over."""
    tasks_kept_max: int = Field(default=1000, ge=0)
    """Tasks over that can still be asked for."""
    task_interval_s: float = Field(default=0.1, gt=0)
    """How often tasks are planned."""
    task_steps_max: int = Field(default=4, gt=0)
    """Copies under way at once."""
    task_steps_per_node_max: int = Field(default=2, gt=0)
    """Copies into one node at once."""
    task_keys_per_step: int = Field(default=256, gt=0, le=4096)
    """Keys of one copy call."""
    task_attempts_max: int = Field(default=5, gt=0)
    """How often one block is tried."""
    task_retry_delay_s: float = Field(default=0.5, gt=0)
    """Wait before the second try; doubles."""
    copy_timeout_s: float = Field(default=60.0, gt=0)
    """Time for one copy call."""

    node_call_timeout_s: float = Field(default=5.0, gt=0)
    """Time for one call to a node."""
    node_calls_max: int = Field(default=64, gt=0)
    """Calls to nodes at once."""
    tenant_quotas_bytes: dict[str, int] = Field(default_factory=dict)
    """Optional quotas by tenant name."""

    @model_validator(mode="after")
    def _ordered(self) -> Self:
        if not self.heartbeat_interval_s < self.suspect_after_s <= self.dead_after_s <= self.forget_after_s:
            raise ValueError(
                "need heartbeat_interval_s < suspect_after_s <= dead_after_s <= forget_after_s; "
                "a node is suspect only after it missed at least one heartbeat"
            )
        return self

    @classmethod
    def of(cls, section: MasterSection) -> Self:
        """Return the limits that belong to a configuration."""
        return cls(
            heartbeat_interval_s=section.heartbeat_interval_s,
            suspect_after_s=section.suspect_after_s,
            dead_after_s=section.lease_s,
            slow_start_s=section.slow_start_s,
        )

    def membership_rules(self) -> MembershipRules:
        """Limits of membership."""
        return MembershipRules(
            suspect_after_s=self.suspect_after_s,
            dead_after_s=self.dead_after_s,
            forget_after_s=self.forget_after_s,
            nodes_max=self.nodes_max,
            refresh_interval_s=self.refresh_interval_s,
            free_change_share=self.free_change_share,
        )

    def placement_rules(self) -> PlacementRules:
        """How weights are made."""
        return PlacementRules(
            slow_start_s=self.slow_start_s,
            slow_start_floor=self.slow_start_floor,
            slow_start_fill=self.slow_start_fill,
        )

    def report_rules(self) -> ReportRules:
        """Limits of reports."""
        return ReportRules(
            buffered_bytes_max=self.report_buffer_bytes_max,
            parts_max=self.report_parts_max,
            full_timeout_s=self.report_timeout_s,
        )

    def task_rules(self) -> TaskRules:
        """Limits of tasks."""
        return TaskRules(
            steps_in_flight_max=self.task_steps_max,
            steps_per_node_max=self.task_steps_per_node_max,
            keys_per_step=self.task_keys_per_step,
            attempts_max=self.task_attempts_max,
            retry_delay_s=self.task_retry_delay_s,
            active_max=self.tasks_active_max,
            kept_max=self.tasks_kept_max,
        )
