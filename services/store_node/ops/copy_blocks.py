"""CopyBlocks: fetch blocks from another node over the data plane and keep them under the same tenant."""

from __future__ import annotations

from mooncache.client.keys import split_keys
from mooncache.errors import OK, Draining, InvalidArgument, Unsupported
from mooncache.proto.v1 import store_node_pb2 as pb
from mooncache.runtime.rpc import CallContext
from mooncache.store_node.ops.checks import check_keys
from mooncache.store_node.origins import take_over_origins
from mooncache.store_node.state import StoreNodeState

_SLACK_S = 0.25
_ORIGINS_S = 2.0


async def handle(
    state: StoreNodeState, request: pb.CopyBlocksRequest, context: CallContext
) -> pb.CopyBlocksResponse:
    state.check_fence(request.fence)
    check_keys(request.keys)
    if state.copier is None:
        raise Unsupported("this node has no data-plane client to copy with")
    if state.draining:
        raise Draining("The node is draining and takes no new blocks.")
    if request.source.node_id == state.identity.node_id:
        raise InvalidArgument("A node cannot copy from itself.")
    if not request.tenant:
        raise InvalidArgument("tenant must name the owner of the blocks.")
    limit_s = max(0.05, context.timeout_s - _SLACK_S)
    if request.timeout_ms:
        limit_s = min(limit_s, request.timeout_ms / 1000.0)
    codes, copied_bytes = await state.copier.copy(
        request.tenant, request.keys, request.source, limit_s, request.bytes_per_s
    )
    state.count("copied_bytes", copied_bytes)
    await take_over_origins(
        state, request.source, request.tenant, request.keys, codes, min(_ORIGINS_S, limit_s)
    )
    if request.spare:
        made = [key for key, code in zip(split_keys(request.keys), codes, strict=True) if code == OK]
        state.spares.made(request.tenant, made, state.clock.now_s())
    return pb.CopyBlocksResponse(codes=codes, copied_bytes=copied_bytes)
