"""ResumeRequests: a gateway tells a leader of its requests under way, so that nothing is counted that has ended.

What the standby had from the former leader is known already; the rest is counted now. Decisions for this gateway that
it does not name have ended, or their answer never reached it. Of the leader's own in this term only those that are old
enough are closed, because the answer to a young one may be on its way.
"""

from __future__ import annotations

from functools import partial
from typing import Final

from mooncache.conductor.config import NAME_CHARS_MAX
from mooncache.conductor.core.adoption import adopt
from mooncache.conductor.core.gateways import COUNT_MAX
from mooncache.conductor.core.records import DecisionState
from mooncache.conductor.messages import decision_under_way, gateway_of
from mooncache.conductor.ops import report_progress
from mooncache.conductor.state import ConductorState
from mooncache.errors import DecisionUnknown, LimitExceeded
from mooncache.proto.v1 import conductor_pb2 as pb
from mooncache.runtime.logs import Event, get_logger
from mooncache.runtime.rpc import CallContext

REQUESTS_MAX: Final = 1024  # in one call
OPEN_IDS_MAX: Final = 65_536
UNNAMED_AFTER_S: Final = (
    20.0  # a gateway takes no plan that comes later, and waits not so long to name those it has
)
_AGE_MAX_S: Final = 86_400.0

log = get_logger(__name__)


async def handle(
    state: ConductorState, request: pb.ResumeRequestsRequest, context: CallContext
) -> pb.ResumeRequestsResponse:
    """Take them in; again and again is harmless. Raises NotLeader, InvalidArgument, TooLarge, LimitExceeded."""
    state.leadership.require(request.known_term, context.now_s)
    gateway = gateway_of(request.gateway)
    if len(request.requests) > REQUESTS_MAX or len(request.open_decision_ids) > OPEN_IDS_MAX:
        raise LimitExceeded(f"at most {REQUESTS_MAX} requests in one call, and {OPEN_IDS_MAX} in all")
    resumed = sum(_resume(state, open_request, context.now_s) for open_request in request.requests)
    closed: list[str] = []
    if request.last:
        open_ids = frozenset(name[:NAME_CHARS_MAX] for name in request.open_decision_ids)
        closed = state.adopted.unknown_to(gateway.gateway_id, open_ids)
        if request.gateway_run:
            before_s = context.now_s - UNNAMED_AFTER_S
            if request.known_term >= state.leadership.term:  # it takes no answers of older terms
                before_s = max(before_s, state.leadership.began_s)
            closed += state.core.work.unnamed(request.gateway_run, open_ids, before_s)
        closed = close_lost(state, closed, context.now_s)
        _pass_on(state, request)
        if resumed or closed or not request.gateway_run:
            log.info(Event.CONDUCTOR_RESUMED, gateway=gateway.gateway_id, resumed=resumed, closed=len(closed))
    state.give_up()
    return pb.ResumeRequestsResponse(
        term=state.leadership.term, resumed_count=resumed, closed_count=len(closed)
    )


def _pass_on(state: ConductorState, request: pb.ResumeRequestsRequest) -> None:
    """Let standbys close what the gateway does not name, as this leader does: once in a term for each process."""
    run, term = request.gateway_run, state.leadership.term
    if not run or request.known_term < term or run in state.named_runs:
        return
    if len(state.named_runs) >= COUNT_MAX:
        return
    state.named_runs.add(run)
    open_ids = [name[:NAME_CHARS_MAX] for name in request.open_decision_ids]
    named = pb.ResumeRequestsRequest(known_term=term, gateway_run=run, open_decision_ids=open_ids, last=True)
    state.note(lambda: pb.JournalEntry(named=named))


def close_unnamed(state: ConductorState, named: pb.ResumeRequestsRequest, now_s: float) -> None:
    """Close, as a standby, what the leader does not know and a gateway did not name to it. Raises LimitExceeded."""
    if len(named.open_decision_ids) > OPEN_IDS_MAX:
        raise LimitExceeded(f"at most {OPEN_IDS_MAX} decisions are named")
    open_ids = frozenset(named.open_decision_ids)
    for decision_id in state.carried.unnamed(named.known_term, named.gateway_run, open_ids):
        close_as_standby(state, decision_id, now_s)


def close_as_standby(state: ConductorState, decision_id: str, now_s: float) -> None:
    """Close a decision that no gateway works on, as the leader has done."""
    state.core.close(decision_id, DecisionState.LOST, now_s)
    state.adopted.ended(decision_id)


def close_lost(state: ConductorState, decision_ids: list[str], now_s: float) -> list[str]:
    """Close decisions that no gateway works on, unless they are closed already; return those that were open."""
    closed = [decision_id for decision_id in decision_ids if state.core.work.get(decision_id) is not None]
    for decision_id in closed:
        state.core.close(decision_id, DecisionState.LOST, now_s)
        state.note(partial(pb.JournalEntry, lost_decision_id=decision_id))
    return closed


def _resume(state: ConductorState, request: pb.OpenRequest, now_s: float) -> bool:
    """Count a request that is not known here, as of when it was scheduled; whether it was not known."""
    made = decision_under_way(request)
    if not made.admitted or state.core.work.get(made.decision_id) is not None:
        return False
    if state.adopted.has_ended(made.decision_id):
        return False
    at_s = now_s - min(request.age_ms / 1e3, _AGE_MAX_S)
    wall_s = state.clock.wall_s() - (now_s - at_s)
    if not adopt(state.core, made, at_s, wall_s):
        return False
    decided = pb.DecidedRequest(request=request.request, plan=request.plan, branch=made.branch)
    decided.prefix_tokens, decided.fetch_tokens = made.prefix_tokens, made.fetch_tokens
    decided.ttft_s, decided.compute_s = made.ttft_s, made.compute_s
    state.note(lambda: pb.JournalEntry(decided=decided), at_s)
    for report in request.reports:
        try:
            report_progress.take_in(state, report, now_s)
        except DecisionUnknown:
            break
        state.note(partial(pb.JournalEntry, progress=report))
    return True
