"""RemoveBlocks: remove blocks from every node that holds them, or to which one just moves.

The directory learns it from the nodes' reports.
"""

from __future__ import annotations

from mooncache import errors
from mooncache.client.keys import split_keys
from mooncache.master.messages import tenant_of
from mooncache.master.shell.fan_out import all_gone, to_holders
from mooncache.master.shell.moves_barred import moves_barred
from mooncache.master.state import MasterState
from mooncache.proto.v1 import master_pb2, store_node_pb2
from mooncache.runtime.rpc import CallContext


async def handle(
    state: MasterState, request: master_pb2.RemoveBlocksRequest, context: CallContext
) -> master_pb2.RemoveBlocksResponse:
    """Remove; one code for each key, NOT_FOUND when no node held it.

    Raises NotLeader, InvalidArgument, TooLarge.
    """
    state.require_leading()
    _, tenant = tenant_of(request.tenant, context)
    keys = split_keys(request.keys, state.limits.keys_per_call_max)

    def make(packed: bytes) -> store_node_pb2.DropBlocksRequest:
        return store_node_pb2.DropBlocksRequest(
            tenant_id=tenant, keys=packed, reason=store_node_pb2.DROP_REASON_REMOVED
        )

    async with moves_barred(state, tenant, frozenset(keys), context) as late:
        beside = [state.rebalance.places(tenant, key) for key in keys]
        codes = await to_holders(state, "DropBlocks", tenant, keys, make, context, beside)
    for key, each in zip(keys, codes, strict=True):
        if key in late:
            each.append(errors.NodeUnavailable.code)  # its copy may still arrive
    return master_pb2.RemoveBlocksResponse(codes=[all_gone(each) for each in codes])
