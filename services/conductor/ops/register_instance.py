"""RegisterInstance: an engine exists."""

from __future__ import annotations

from mooncache import errors
from mooncache.conductor.core.registry import Instance, InstanceState, RequestedState
from mooncache.conductor.messages import STATES, info_of
from mooncache.conductor.state import ConductorState
from mooncache.kvcache.instance_messages import INSTANCE_ROLE_NUMBERS
from mooncache.proto.v1 import conductor_pb2 as pb
from mooncache.runtime.logs import Event, get_logger
from mooncache.runtime.rpc import CallContext

log = get_logger(__name__)


async def handle(
    state: ConductorState, request: pb.RegisterInstanceRequest, context: CallContext
) -> pb.RegisterInstanceResponse:
    """Take the instance in; again and again is harmless.

    Raises NotLeader, InvalidArgument, LimitExceeded, or StaleIncarnation: another worker serves that name.
    """
    state.leadership.require(request.known_term, context.now_s)
    instance = take_in(state, request, context.now_s)
    state.note(lambda: pb.JournalEntry(registered=request))
    info = instance.info
    log.info(
        Event.INSTANCE_REGISTERED,
        instance_id=info.instance_id,
        model=info.model,
        role=instance.role,
        engine=info.engine,
        url=info.url,
    )
    apart = state.core.registry.apart(instance)
    if apart:
        log.warning(
            Event.INSTANCE_APART,
            code=errors.PassportMismatch.name,
            instance_id=info.instance_id,
            model=info.model,
            reason=apart,
        )
    return pb.RegisterInstanceResponse(
        report_interval_ms=max(1, int(instance.next_report_s * 1e3)),
        lease_ms=max(1, int(state.section.lease_s * 1e3)),
        role=INSTANCE_ROLE_NUMBERS[instance.role],
        role_pinned=instance.role_pinned,
        term=state.leadership.term,
    )


def take_in(state: ConductorState, request: pb.RegisterInstanceRequest, now_s: float) -> Instance:
    """Take the instance in, as a leader or as a standby. Raises as `handle`."""
    info = info_of(request.instance)
    said = STATES.get(request.instance.state, InstanceState.STARTING)
    if said not in (InstanceState.STARTING, InstanceState.READY, InstanceState.DRAINING):
        raise errors.InvalidArgument("a worker registers an instance that is starting, ready or draining")
    requested = RequestedState(
        request.worker_run, request.drain if request.HasField("drain") else None, request.role_pinned
    )
    instance = state.core.register(info, said, now_s, requested)
    state.announce()
    state.give_up()
    return instance
