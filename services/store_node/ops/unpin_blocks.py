"""UnpinBlocks: take pins back."""

from __future__ import annotations

from mooncache.proto.v1 import store_node_pb2 as pb
from mooncache.runtime.rpc import CallContext
from mooncache.store_node.ops.checks import check_keys
from mooncache.store_node.state import StoreNodeState


async def handle(
    state: StoreNodeState, request: pb.NodeUnpinBlocksRequest, context: CallContext
) -> pb.NodeUnpinBlocksResponse:
    state.check_fence(request.fence)
    check_keys(request.keys)
    return pb.NodeUnpinBlocksResponse(codes=state.core.unpin(request.tenant_id, request.keys))
