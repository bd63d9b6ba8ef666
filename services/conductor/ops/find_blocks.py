"""FindBlocks: which leading blocks of a prompt the pool has now."""

from __future__ import annotations

from mooncache.client.keys import count_keys
from mooncache.conductor.config import KEYS_MAX, NAME_CHARS_MAX
from mooncache.conductor.core.decisions import PoolState
from mooncache.conductor.core.give_ups import GiveUp, GiveUpReason
from mooncache.conductor.messages import pool_tenant_of
from mooncache.conductor.state import ConductorState
from mooncache.proto.v1 import conductor_pb2 as pb
from mooncache.runtime.rpc import CallContext


async def handle(
    state: ConductorState, request: pb.FindBlocksRequest, context: CallContext
) -> pb.FindBlocksResponse:
    """Ask the pool; an answer in which not all nodes took part does not count. Raises InvalidArgument, TooLarge."""
    count = count_keys(request.keys, KEYS_MAX)
    node = request.store_node[:NAME_CHARS_MAX]
    tenant = pool_tenant_of(request.pool_tenant)
    found = await state.pool.match(request.keys, tenant)
    whole = found.state == PoolState.OK and not found.unreachable_nodes
    if whole and node and found.blocks >= count > 0:
        moved = GiveUp("", request.keys, 0, count, node, GiveUpReason.ELSEWHERE, pool_tenant=tenant)
        state.give_up_calls.start([moved])
    return pb.FindBlocksResponse(known=whole, leading_blocks=found.blocks)
