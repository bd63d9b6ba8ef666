"""SetDraining: refuse new blocks, or take them again."""

from __future__ import annotations

from mooncache.proto.v1 import store_node_pb2 as pb
from mooncache.runtime.logs import Event, get_logger
from mooncache.runtime.rpc import CallContext
from mooncache.store_node.state import StoreNodeState

log = get_logger(__name__)


async def handle(
    state: StoreNodeState, request: pb.SetDrainingRequest, context: CallContext
) -> pb.SetDrainingResponse:
    state.check_fence(request.fence)
    if state.draining != request.draining:
        state.set_draining(request.draining)
        event = Event.DRAIN_STARTED if request.draining else Event.DRAIN_FINISHED
        log.info(event, node_id=state.identity.node_id)
        state.wake_membership.set()  # the master should hear of it now, not at the next heartbeat
    return pb.SetDrainingResponse(state=state.node_state)
