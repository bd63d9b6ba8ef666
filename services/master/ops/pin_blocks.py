"""PinBlocks: keep blocks from eviction on every node that holds them, for a while."""

from __future__ import annotations

from mooncache import errors
from mooncache.client.keys import split_keys
from mooncache.master.messages import tenant_of
from mooncache.master.shell.fan_out import any_ok, to_holders
from mooncache.master.state import MasterState
from mooncache.proto.v1 import master_pb2, store_node_pb2
from mooncache.runtime.rpc import CallContext


async def handle(
    state: MasterState, request: master_pb2.PinBlocksRequest, context: CallContext
) -> master_pb2.PinBlocksResponse:
    """Pin; one code for each key. Raises NotLeader, InvalidArgument, TooLarge, PermissionDenied."""
    state.require_leading()
    _, tenant = tenant_of(request.tenant, context)
    keys = split_keys(request.keys, state.limits.keys_per_call_max)
    ttl_max_ms = round(state.limits.pin_ttl_max_s * 1000)
    if not 0 < request.ttl_ms <= ttl_max_ms:
        raise errors.InvalidArgument(f"ttl_ms must be in 1..{ttl_max_ms}, not {request.ttl_ms}")

    def make(packed: bytes) -> store_node_pb2.NodePinBlocksRequest:
        return store_node_pb2.NodePinBlocksRequest(tenant_id=tenant, keys=packed, ttl_ms=request.ttl_ms)

    codes = await to_holders(state, "PinBlocks", tenant, keys, make, context)
    return master_pb2.PinBlocksResponse(codes=[any_ok(each) for each in codes])
