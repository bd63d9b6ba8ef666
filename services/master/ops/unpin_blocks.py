"""UnpinBlocks: take pins back."""

from __future__ import annotations

from mooncache.client.keys import split_keys
from mooncache.master.messages import tenant_of
from mooncache.master.shell.fan_out import any_ok, to_holders
from mooncache.master.state import MasterState
from mooncache.proto.v1 import master_pb2, store_node_pb2
from mooncache.runtime.rpc import CallContext


async def handle(
    state: MasterState, request: master_pb2.UnpinBlocksRequest, context: CallContext
) -> master_pb2.UnpinBlocksResponse:
    """Unpin; one code for each key. Raises NotLeader, InvalidArgument, TooLarge, PermissionDenied."""
    state.require_leading()
    _, tenant = tenant_of(request.tenant, context)
    keys = split_keys(request.keys, state.limits.keys_per_call_max)

    def make(packed: bytes) -> store_node_pb2.NodeUnpinBlocksRequest:
        return store_node_pb2.NodeUnpinBlocksRequest(tenant_id=tenant, keys=packed)

    codes = await to_holders(state, "UnpinBlocks", tenant, keys, make, context)
    return master_pb2.UnpinBlocksResponse(codes=[any_ok(each) for each in codes])
