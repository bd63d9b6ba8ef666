"""ReplicateBlocks: start a task that brings blocks to a number of copies."""

from __future__ import annotations

from mooncache import errors
from mooncache.client.keys import split_keys
from mooncache.master.messages import REPLICAS_MAX, check_replicas, tenant_of
from mooncache.master.state import MasterState
from mooncache.proto.v1 import master_pb2
from mooncache.runtime.logs import Event, get_logger
from mooncache.runtime.rpc import CallContext

log = get_logger(__name__)


async def handle(
    state: MasterState, request: master_pb2.ReplicateBlocksRequest, context: CallContext
) -> master_pb2.ReplicateBlocksResponse:
    """Start the task.

    Raises NotLeader, ConductorSuperseded, InvalidArgument, TooLarge, UnknownNode, QuotaExceeded, LimitExceeded.
    """
    state.require_leading()
    state.obey_conductor(request.conductor_term)
    tenant, tenant_id = tenant_of(request.tenant, context)
    keys = split_keys(request.keys, state.limits.keys_per_call_max)
    if not keys:
        raise errors.InvalidArgument("name at least one key to replicate")
    count = check_replicas(request.replica_count)
    if len(request.target_node_ids) > REPLICAS_MAX:
        raise errors.InvalidArgument(f"at most {REPLICAS_MAX} target nodes can be preferred")
    preferred = [state.membership.require(node_id).index for node_id in request.target_node_ids]
    state.ledger.learn(tenant_id, tenant)
    if state.ledger.quotas_bytes:
        state.ledger.refuse_over_quota(tenant_id, state.directory.tenant_usage())
    task = state.tasks.replicate(
        tenant_id, tenant, keys, count, preferred, context.now_s, spare=request.spare
    )
    log.info(Event.TASK_STARTED, task_id=task.task_id, kind=task.kind.value, block_count=task.block_count)
    return master_pb2.ReplicateBlocksResponse(task_id=task.task_id)
