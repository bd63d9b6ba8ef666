"""FollowConductor: another conductor asks who leads, and a standby asks what has happened since."""

from __future__ import annotations

from typing import Final

from mooncache.conductor.member_messages import announcement_of
from mooncache.conductor.messages import STANDING_NUMBERS, registration_of
from mooncache.conductor.state import ConductorState
from mooncache.proto.v1 import conductor_pb2 as pb
from mooncache.runtime.rpc import CallContext

WAIT_MAX_S: Final = 1.0
WANTED_MAX: Final = 4096
_UNKNOWN: Final = -1


async def handle(
    state: ConductorState, request: pb.FollowConductorRequest, context: CallContext
) -> pb.FollowConductorResponse:
    """Answer at once, but for a standby that knows everything: it waits for the next entry."""
    state.leadership.hear(request.known_term)
    known = request.known_run == state.run
    if request.probe or (not state.leadership.leads and not known):
        return _response(state)
    wanted = list(request.want_full)[:WANTED_MAX]
    state.full_wanted.update(name for name in wanted if state.core.registry.get(name) is not None)
    cursor = request.cursor if known else _UNKNOWN
    page = state.journal.after(cursor, context.now_s)
    if not page.entries and not page.anew and request.wait_ms:
        await state.noted(min(request.wait_ms / 1e3, WAIT_MAX_S))
        page = state.journal.after(cursor, state.clock.now_s())  # also of one that has just ceased to lead
    answer = _response(state)
    if page.anew:
        answer.anew = True
        answer.entries.extend(
            pb.JournalEntry(registered=registration_of(instance)) for instance in state.core.registry
        )
        answer.entries.extend(announcement_of(member) for member in state.members.listed(state.clock.now_s()))
    answer.entries.extend(page.entries)
    answer.cursor, answer.more = page.cursor, page.more
    return answer


def _response(state: ConductorState) -> pb.FollowConductorResponse:
    book = state.leadership
    return pb.FollowConductorResponse(run=state.run, term=book.term, role=STANDING_NUMBERS[book.standing])
