"""GetRepair: how the pool's copies stand, how far the repair is, and whether blocks move to emptier nodes."""

from __future__ import annotations

from mooncache.master.core.placement import failure_domains
from mooncache.master.core.rebalance_types import RebalanceState
from mooncache.master.core.repair_types import RepairState
from mooncache.master.state import MasterState
from mooncache.proto.v1 import master_pb2
from mooncache.runtime.rpc import CallContext

_STATES = {
    RepairState.OFF: master_pb2.REPAIR_STATE_OFF,
    RepairState.WHOLE: master_pb2.REPAIR_STATE_WHOLE,
    RepairState.WAITING: master_pb2.REPAIR_STATE_WAITING,
    RepairState.REPAIRING: master_pb2.REPAIR_STATE_REPAIRING,
    RepairState.BLOCKED: master_pb2.REPAIR_STATE_BLOCKED,
}
_REBALANCE_STATES = {
    RebalanceState.OFF: master_pb2.REBALANCE_STATE_OFF,
    RebalanceState.AT_REST: master_pb2.REBALANCE_STATE_AT_REST,
    RebalanceState.WAITING: master_pb2.REBALANCE_STATE_WAITING,
    RebalanceState.MOVING: master_pb2.REBALANCE_STATE_MOVING,
}


async def handle(
    state: MasterState, request: master_pb2.GetRepairRequest, context: CallContext
) -> master_pb2.GetRepairResponse:
    """The figures. Raises NotLeader."""
    state.require_leading()
    found = state.repair.figures(context.now_s)
    sites = {index: where for index, where in state.sites().items() if state.lasting(index)}
    own = state.tenants.tenants.items()
    return master_pb2.GetRepairResponse(
        state=_STATES[found.state],
        wait_ms=round(found.wait_s * 1000),
        short_block_count=found.short_blocks,
        left_bytes=found.left_bytes,
        close_block_count=found.close_blocks,
        queued_block_count=found.queued_blocks,
        steps_in_flight=found.steps_in_flight,
        resting_block_count=found.resting_blocks,
        resting_code=found.resting_code,
        bytes_per_s=round(found.bytes_per_s),
        limit_bytes_per_s=round(state.limits.repair.bytes_per_s),
        estimate_ms=round(found.estimate_s * 1000),
        copied_bytes=found.copied_bytes,
        copied_block_count=found.copied_blocks,
        trimmed_count=found.trimmed,
        default_replicas=state.limits.repair.replicas,
        tenant_replicas={name: limits.replicas for name, limits in own if limits.replicas},
        spread_over=failure_domains(sites, sites).level,
        rebalance=_rebalance(state, context.now_s),
    )


def _rebalance(state: MasterState, now_s: float) -> master_pb2.RebalanceStatus:
    found = state.rebalance.figures(now_s)
    return master_pb2.RebalanceStatus(
        state=_REBALANCE_STATES[found.state],
        wait_ms=round(found.wait_s * 1000),
        left_bytes=found.left_bytes,
        bytes_per_s=round(found.bytes_per_s),
        limit_bytes_per_s=round(state.limits.rebalance.bytes_per_s),
        estimate_ms=round(found.estimate_s * 1000),
        moved_bytes=found.moved_bytes,
        moved_block_count=found.moved_blocks,
        skipped_block_count=found.skipped_blocks,
        steps_in_flight=found.steps_in_flight,
        fullest_percent=round(found.fullest_share * 100),
        emptiest_percent=round(found.emptiest_share * 100),
    )
