"""SetInstance: an operator changes the role of an instance, or drains it."""

from __future__ import annotations

from mooncache.conductor.messages import instance_message
from mooncache.conductor.state import ConductorState
from mooncache.kvcache.instance_messages import INSTANCE_ROLES
from mooncache.proto.v1 import conductor_pb2 as pb
from mooncache.runtime.logs import Event, get_logger
from mooncache.runtime.rpc import CallContext

log = get_logger(__name__)


async def handle(
    state: ConductorState, request: pb.SetInstanceRequest, context: CallContext
) -> pb.SetInstanceResponse:
    """Carry it out; the worker learns it from the answer to its next report. Raises NotLeader, InstanceUnknown."""
    state.leadership.require(0, context.now_s)
    role = INSTANCE_ROLES.get(request.role)
    drain = request.drain if request.HasField("drain") else None
    instance = state.core.registry.set(request.instance_id, role, drain, context.now_s, pinned=True)
    state.announce()
    state.note(lambda: pb.JournalEntry(wish=pb.InstanceWish(request=request, pinned=True)))
    log.info(
        Event.INSTANCE_SET, instance_id=request.instance_id, role=instance.role, drain=instance.drain_wanted
    )
    return pb.SetInstanceResponse(instance=instance_message(instance))
