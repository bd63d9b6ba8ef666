"""The one list of the master's periodic duties. They rest while this master does not lead."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from mooncache.master.background import check_invariants, expire_members, refresh_map
from mooncache.master.background.rebalance_pool import RebalanceRunner
from mooncache.master.background.repair_replicas import RepairRunner
from mooncache.master.background.run_tasks import TaskRunner
from mooncache.master.state import MasterState
from mooncache.runtime.duties import Duty


def master_duties(
    state: MasterState, tasks: TaskRunner, repairs: RepairRunner, rebalance: RebalanceRunner
) -> list[Duty]:
    """Every duty of the leader."""
    limits = state.limits

    def leading(run_once: Callable[[], Awaitable[None]]) -> Callable[[], Awaitable[None]]:
        async def run() -> None:
            if state.leading:
                await run_once()

        return run

    return [
        Duty("expire_members", leading(lambda: expire_members.run_once(state)), limits.expire_interval_s),
        Duty("refresh_map", leading(lambda: refresh_map.run_once(state)), limits.expire_interval_s),
        Duty("run_tasks", leading(tasks.run_once), limits.task_interval_s),
        Duty("repair_replicas", leading(repairs.run_once), limits.task_interval_s),
        Duty("rebalance_pool", leading(rebalance.run_once), limits.task_interval_s),
        Duty("check_invariants", leading(lambda: check_invariants.run_once(state)), limits.check_interval_s),
    ]
