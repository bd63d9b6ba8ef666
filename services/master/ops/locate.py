"""Locate: which nodes hold the given blocks."""

from __future__ import annotations

from mooncache.client.keys import count_keys
from mooncache.master.messages import tenant_of
from mooncache.master.state import MasterState
from mooncache.proto.v1 import master_pb2
from mooncache.runtime.rpc import CallContext


async def handle(
    state: MasterState, request: master_pb2.LocateRequest, context: CallContext
) -> master_pb2.LocateResponse:
    """Look the keys up. Raises NotLeader, InvalidArgument, TooLarge, PermissionDenied."""
    state.require_leading()
    _, tenant = tenant_of(request.tenant, context)
    count = count_keys(request.keys, state.limits.keys_per_call_max)
    locations = state.directory.locate(tenant, request.keys)
    held = state.directory.held(tenant, request.keys)
    state.instruments.located.labels("hit").inc(held)
    state.instruments.located.labels("miss").inc(count - held)
    members = state.membership
    return master_pb2.LocateResponse(locations=locations, epoch=members.epoch, term=members.term)
