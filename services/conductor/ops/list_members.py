"""ListMembers: every process of the cluster; each conductor answers, leader or not."""

from __future__ import annotations

from mooncache.conductor.member_messages import view_of_member
from mooncache.conductor.messages import STANDING_NUMBERS
from mooncache.conductor.state import ConductorState
from mooncache.proto.v1 import conductor_pb2 as pb
from mooncache.runtime.rpc import CallContext


async def handle(
    state: ConductorState, request: pb.ListMembersRequest, context: CallContext
) -> pb.ListMembersResponse:
    """The members as this conductor knows them."""
    return pb.ListMembersResponse(
        members=[view_of_member(listed) for listed in state.members.listed(context.now_s)],
        wall_ms=round(state.clock.wall_s() * 1e3),
        role=STANDING_NUMBERS[state.leadership.standing],
        pool_reason=state.pool_reason,
    )
