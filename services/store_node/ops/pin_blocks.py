"""PinBlocks: keep blocks from eviction for a while."""

from __future__ import annotations

from mooncache.errors import InvalidArgument
from mooncache.proto.v1 import store_node_pb2 as pb
from mooncache.runtime.rpc import CallContext
from mooncache.store_node.ops.checks import MAX_TTL_MS, check_keys
from mooncache.store_node.state import StoreNodeState


async def handle(
    state: StoreNodeState, request: pb.NodePinBlocksRequest, context: CallContext
) -> pb.NodePinBlocksResponse:
    state.check_fence(request.fence)
    check_keys(request.keys)
    if not 0 < request.ttl_ms <= MAX_TTL_MS:
        raise InvalidArgument(f"ttl_ms must be between 1 and {MAX_TTL_MS}; got {request.ttl_ms}.")
    return pb.NodePinBlocksResponse(codes=state.core.pin(request.tenant_id, request.keys, request.ttl_ms))
