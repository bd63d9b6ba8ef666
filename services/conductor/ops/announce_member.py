"""AnnounceMember: a process of the cluster says that it is there, or that it ends."""

from __future__ import annotations

from mooncache.conductor.member_messages import member_of
from mooncache.conductor.state import ConductorState
from mooncache.proto.v1 import conductor_pb2 as pb
from mooncache.runtime.rpc import CallContext


async def handle(
    state: ConductorState, request: pb.AnnounceMemberRequest, context: CallContext
) -> pb.AnnounceMemberResponse:
    """Note it, and say when to come again. Raises NotLeader, InvalidArgument."""
    state.leadership.require(request.known_term, context.now_s)
    take_in(state, request, context.now_s)
    state.note(lambda: pb.JournalEntry(member=request))
    return pb.AnnounceMemberResponse(
        interval_ms=round(state.members.interval_s * 1e3),
        wall_ms=round(state.clock.wall_s() * 1e3),
        term=state.leadership.term,
    )


def take_in(state: ConductorState, request: pb.AnnounceMemberRequest, at_s: float) -> None:
    """Note an announcement of that moment. Raises InvalidArgument."""
    state.members.heard(member_of(request.member), at_s, leaving=request.leaving)
