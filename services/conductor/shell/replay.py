"""What a leader tells its standby, done again: the standby's state becomes the leader's.

Everything has the time at which it happened there, so what is learnt of it is the same. An entry that makes no sense
is logged and passed over: what it would have said is reported again, or missing from a record.
"""

from __future__ import annotations

from typing import Final

from mooncache.client.keys import count_keys
from mooncache.conductor.config import KEYS_MAX, NAME_CHARS_MAX, TEXT_CHARS_MAX
from mooncache.conductor.core.adoption import adopt
from mooncache.conductor.core.seen import MissRange, MissReason
from mooncache.conductor.messages import gateway_of, made_decision_of
from mooncache.conductor.ops import (
    announce_member,
    register_instance,
    report_instance,
    report_progress,
    resume_requests,
    schedule,
)
from mooncache.conductor.state import ConductorState
from mooncache.errors import DecisionUnknown, InstanceUnknown, InvalidArgument, MooncacheError
from mooncache.kvcache.instance_messages import INSTANCE_ROLES
from mooncache.proto.v1 import conductor_pb2 as pb
from mooncache.runtime.logs import Event, get_logger

_MISSES_MAX: Final = 10_000
_COPIES_MAX: Final = 64
_REASONS: Final = {str(reason): reason for reason in MissReason}

log = get_logger(__name__)


def replay(state: ConductorState, entry: pb.JournalEntry, now_s: float) -> bool:
    """Take one entry in, and keep it for those who follow this conductor later; never raises MooncacheError.

    Returns False when it is of an instance that is not known here.
    """
    known = True
    at_s = now_s - entry.age_ms / 1e3
    what = entry.WhichOneof("happened")
    try:
        _take_in(state, entry, what, at_s)
    except DecisionUnknown:
        pass  # of before this standby began, and no longer kept
    except InstanceUnknown:
        known = False
    except MooncacheError as error:
        log.warning(Event.CONDUCTOR_ENTRY_INVALID, what=what, code=error.name, reason=error.message)
    state.note(lambda: entry, at_s)
    return known


def _take_in(state: ConductorState, entry: pb.JournalEntry, what: str | None, at_s: float) -> None:
    match what:
        case "registered":
            register_instance.take_in(state, entry.registered, at_s)
        case "reported":
            report_instance.take_in(state, entry.reported, at_s)
        case "decided":
            _decided(state, entry.decided, at_s)
        case "progress":
            report_progress.take_in(state, entry.progress, at_s)
        case "wish":
            _wish(state, entry.wish, at_s)
        case "copied":
            _copied(state, entry.copied, at_s)
        case "explained":
            _explained(state, entry.explained)
        case "gateway":
            state.gateways.heard(gateway_of(entry.gateway), at_s)
        case "member":
            announce_member.take_in(state, entry.member, at_s)
        case "lost_decision_id":
            resume_requests.close_as_standby(state, entry.lost_decision_id, at_s)
        case "named":
            resume_requests.close_unnamed(state, entry.named, at_s)
        case _:
            pass  # of a newer version


def _decided(state: ConductorState, message: pb.DecidedRequest, at_s: float) -> None:
    made = made_decision_of(message)
    state.carried.known_there(made.decision_id)
    wall_s = state.clock.wall_s() - (state.clock.now_s() - at_s)
    if adopt(state.core, made, at_s, wall_s):
        state.adopted.add(made.decision_id, message.request.gateway_id[:NAME_CHARS_MAX])
    record = state.core.records.find(made.decision_id)
    if record is None or not made.admitted or not made.pool_blocks:
        return
    hosts = schedule.reading_hosts(
        state, made.prefill, made.decode, loads=message.plan.pool_hit_tokens > message.plan.local_hit_tokens
    )
    request = made.request
    state.hot.use(
        request.model,
        request.keys,
        made.pool_blocks,
        record.block_tokens,
        at_s,
        hosts,
        request.pool_tenant,
    )


def _wish(state: ConductorState, message: pb.InstanceWish, at_s: float) -> None:
    wished = message.request
    state.core.registry.set(
        wished.instance_id,
        INSTANCE_ROLES.get(wished.role),
        wished.drain if wished.HasField("drain") else None,
        at_s,
        pinned=message.pinned,
    )
    state.announce()


def _copied(state: ConductorState, message: pb.CopiedPrefix, at_s: float) -> None:
    blocks = count_keys(message.keys, KEYS_MAX)
    state.hot.ordered_elsewhere(
        message.model[:NAME_CHARS_MAX],
        message.keys,
        min(message.blocks, blocks),
        max(1, min(message.copies, _COPIES_MAX)),
        message.pool_tenant[:NAME_CHARS_MAX],
        at_s,
    )


def _explained(state: ConductorState, message: pb.ExplainedDecision) -> None:
    record = state.core.records.find(message.decision_id)
    if record is None:
        return
    if len(message.misses) > _MISSES_MAX or len(message.candidates) > TEXT_CHARS_MAX << 8:
        raise InvalidArgument("the explanation of a decision is too large")
    record.policy_view, record.candidates = None, message.candidates
    record.misses = [
        MissRange(miss.from_token, miss.to_token, _REASONS[miss.reason])
        for miss in message.misses
        if miss.reason in _REASONS
    ]
