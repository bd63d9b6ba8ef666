"""SetQuarantine: entries of the quarantine; the answer comes when they are in force."""

from __future__ import annotations

import asyncio

from mooncache.proto.v1 import store_node_pb2 as pb
from mooncache.runtime.quarantine_messages import entries_of
from mooncache.runtime.rpc import CallContext
from mooncache.store_node.state import StoreNodeState


async def handle(
    state: StoreNodeState, request: pb.NodeSetQuarantineRequest, context: CallContext
) -> pb.NodeSetQuarantineResponse:
    """Join and enforce them. Raises NotLeader, StaleIncarnation, InvalidArgument, Unsupported."""
    state.check_fence(request.fence)
    quarantine = state.require_quarantine()
    if quarantine.take(entries_of(request.table)):
        await asyncio.to_thread(quarantine.enforce)
    return pb.NodeSetQuarantineResponse(mark=quarantine.table.mark())
