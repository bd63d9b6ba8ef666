"""DropBlocks: remove blocks, with the reason that the next report will carry."""

from __future__ import annotations

from mooncache.proto.v1 import store_node_pb2 as pb
from mooncache.runtime.rpc import CallContext
from mooncache.store_node.ops.checks import check_keys
from mooncache.store_node.state import StoreNodeState

_REASONS = {pb.DROP_REASON_UNSPECIFIED: 2, pb.DROP_REASON_REMOVED: 2, pb.DROP_REASON_DRAINED: 4}


async def handle(
    state: StoreNodeState, request: pb.DropBlocksRequest, context: CallContext
) -> pb.DropBlocksResponse:
    state.check_fence(request.fence)
    check_keys(request.keys)
    reason = _REASONS.get(request.reason, 2)
    return pb.DropBlocksResponse(codes=state.core.remove(request.tenant_id, request.keys, reason))
