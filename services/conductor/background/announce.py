"""Duty: this conductor announces itself as the other processes do: to itself while it leads, else to the leader."""

from __future__ import annotations

from collections.abc import Callable

from mooncache.client.members import ClockComparison, compare_clocks
from mooncache.conductor.core.leadership import Standing
from mooncache.conductor.core.members import INTERVAL_S
from mooncache.conductor.ops import announce_member
from mooncache.conductor.shell.peers import Peers
from mooncache.conductor.state import ConductorState
from mooncache.errors import MooncacheError
from mooncache.proto.v1 import conductor_pb2 as pb

_WORDS = {Standing.LEADER: "leader", Standing.STANDBY: "standby"}


async def run(state: ConductorState, peers: Peers | None, describe: Callable[[], pb.Member]) -> None:
    """Until cancelled."""
    compared: ClockComparison | None = None
    while True:
        book, request = state.leadership, pb.AnnounceMemberRequest(member=describe())
        request.member.state = _WORDS.get(book.standing, "seeking")
        if state.leads:
            request.member.clock_bound_ms = 0
            now_s = state.clock.now_s()
            announce_member.take_in(state, request, now_s)
            state.note(lambda request=request: pb.JournalEntry(member=request))  # type: ignore[misc]
        elif peers is not None and book.leader >= 0:
            if compared is not None:
                request.member.clock_offset_ms = compared.offset_ms
                request.member.clock_bound_ms = compared.bound_ms
            request.known_term = book.newest
            began_s, wall_s = state.clock.now_s(), state.clock.wall_s()
            try:
                answer = await peers.announce(book.leader, request)
                compared = compare_clocks(answer.wall_ms, wall_s, state.clock.now_s() - began_s)
            except MooncacheError:
                pass  # `lead` notices a leader that does not answer, and says so
        await state.clock.sleep(max(INTERVAL_S, state.members.interval_s))
