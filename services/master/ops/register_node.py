"""RegisterNode: a store node says that it exists."""

from __future__ import annotations

from mooncache import errors
from mooncache.master.messages import rails_of, registration_of
from mooncache.master.state import MasterState
from mooncache.proto.v1 import master_pb2
from mooncache.runtime.formats import CONTROL_MINOR_AHEAD_MAX, CONTROL_MINOR_NOW
from mooncache.runtime.logs import Event, get_logger
from mooncache.runtime.rpc import CallContext

log = get_logger(__name__)


async def handle(
    state: MasterState, request: master_pb2.RegisterNodeRequest, context: CallContext
) -> master_pb2.RegisterNodeResponse:
    """Take the node in. Repeats are harmless."""
    state.require_leading()
    info = registration_of(request)
    if info.protocol_minor > CONTROL_MINOR_NOW + CONTROL_MINOR_AHEAD_MAX:
        raise errors.VersionSkew(
            f"node {info.node_id!r} speaks control protocol minor {info.protocol_minor}, this master "
            f"{CONTROL_MINOR_NOW}; upgrade the master first"
        )
    node, transitions = state.membership.register(info, context.now_s)
    state.membership.note_rails(node, rails_of(request.rails))
    state.apply(transitions)
    if transitions:
        log.info(Event.NODE_REGISTERED, node_id=node.node_id, index=node.index, host_id=info.host_id)
    limits = state.limits
    return master_pb2.RegisterNodeResponse(
        node_index=node.index,
        master_id=state.master_id,
        term=state.membership.term,
        epoch=state.membership.epoch,
        heartbeat_interval_ms=round(limits.heartbeat_interval_s * 1000),
        lease_ms=round(limits.membership.dead_after_s * 1000),
        want_full_report=state.wants_full_report(node),
    )
