"""Match: how long a leading run of a key chain each node holds."""

from __future__ import annotations

from mooncache.client.keys import count_keys
from mooncache.master.messages import tenant_of
from mooncache.master.state import MasterState
from mooncache.proto.v1 import master_pb2
from mooncache.runtime.rpc import CallContext


async def handle(
    state: MasterState, request: master_pb2.MatchRequest, context: CallContext
) -> master_pb2.MatchResponse:
    """Match the chain. Raises NotLeader, InvalidArgument, TooLarge, PermissionDenied."""
    state.require_leading()
    _, tenant = tenant_of(request.tenant, context)
    count_keys(request.keys, state.limits.keys_per_call_max)
    runs = state.directory.match(tenant, request.keys)
    leading = state.directory.leading(tenant, request.keys) if runs else 0
    state.instruments.matched.labels("hit" if runs else "miss").inc()
    members = state.membership
    return master_pb2.MatchResponse(
        leading_block_count=leading,
        nodes=[master_pb2.NodeMatch(node_index=holder, leading_block_count=run) for holder, run in runs],
        epoch=members.epoch,
        term=members.term,
    )
