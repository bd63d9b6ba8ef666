"""ReportInstance: state, load and cache changes of an engine; the answer says what the worker is to do."""

from __future__ import annotations

from mooncache import errors
from mooncache.conductor.config import ENDED_LEGS_MAX, KEYS_MAX, TEXT_CHARS_MAX
from mooncache.conductor.core.cache_index import CacheUpdate
from mooncache.conductor.core.registry import Instance, InstanceState
from mooncache.conductor.messages import STATES, cache_of, load_of
from mooncache.conductor.state import ConductorState
from mooncache.kvcache.instance_messages import INSTANCE_ROLE_NUMBERS
from mooncache.proto.v1 import conductor_pb2 as pb
from mooncache.runtime.logs import Event, get_logger
from mooncache.runtime.rpc import CallContext

log = get_logger(__name__)


async def handle(
    state: ConductorState, request: pb.ReportInstanceRequest, context: CallContext
) -> pb.ReportInstanceResponse:
    """Take the report in. Raises NotLeader, InstanceUnknown: register again."""
    state.leadership.require(request.known_term, context.now_s)
    instance = take_in(state, request, context.now_s)
    state.note(lambda: pb.JournalEntry(reported=request))
    if request.changes.full:
        state.full_wanted.discard(request.instance_id)
    # A worker that was registered with a conductor before this one need not tell its cache again by itself.
    unheard = not instance.sequence
    return pb.ReportInstanceResponse(
        role=INSTANCE_ROLE_NUMBERS[instance.role],
        drain=instance.drain_wanted,
        want_full=instance.want_full or unheard or request.instance_id in state.full_wanted,
        role_pinned=instance.role_pinned,
        report_interval_ms=max(1, int(instance.next_report_s * 1e3)),
        term=state.leadership.term,
    )


def take_in(state: ConductorState, request: pb.ReportInstanceRequest, now_s: float) -> Instance:
    """Take the report in, as a leader or as a standby. Raises InstanceUnknown, LimitExceeded, TooLarge."""
    core = state.core
    instance = core.registry.require(request.instance_id, request.incarnation)
    said = STATES.get(request.state, InstanceState.SUSPECT)
    reason = request.reason[:TEXT_CHARS_MAX]
    core.report(instance, said, load_of(request.load), reason, now_s)
    if request.HasField("changes"):
        changes = request.changes
        try:
            update = core.cache.apply(
                instance,
                full=changes.full,
                stored=changes.stored,
                removed=changes.removed,
                sequence=changes.sequence,
                keys_max=KEYS_MAX,
            )
        except ValueError as full:
            raise errors.LimitExceeded(f"the index of caches is full: {full}") from full
        if state.leads:
            state.instruments.cache_reports.labels(update).inc()
        if update is CacheUpdate.GAP:
            log.info(Event.CACHE_REPORT_GAP, instance_id=request.instance_id, sequence=changes.sequence)
    _take_legs(state, request, now_s)
    state.announce()
    state.give_up()
    return instance


def _take_legs(state: ConductorState, request: pb.ReportInstanceRequest, now_s: float) -> None:
    """Decode legs that have ended; those of decisions that are not known, or not of this instance, are left out."""
    for leg in request.ended_legs[:ENDED_LEGS_MAX]:
        learned = state.core.outcomes.leg_ended(
            leg.decision_id, request.instance_id, cache_of(leg.cache), now_s
        )
        if learned is not None and state.leads:
            state.instruments.learned("leg_ended", learned)
