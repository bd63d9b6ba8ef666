"""WatchLeadership: whether this conductor leads; a long poll that ends when that changes."""

from __future__ import annotations

from mooncache import errors
from mooncache.conductor.config import WATCH_MAX_S, WATCHERS_MAX
from mooncache.conductor.core.leadership import LeadershipBook
from mooncache.conductor.state import ConductorState
from mooncache.proto.v1 import conductor_pb2 as pb
from mooncache.runtime.rpc import CallContext

_ANSWER_S = 0.1  # the answer has to be on its way before the caller's own deadline


async def handle(
    state: ConductorState, request: pb.WatchLeadershipRequest, context: CallContext
) -> pb.WatchLeadershipResponse:
    """Wait for another answer than the caller's last one, then say it. Raises LimitExceeded, ConductorUnavailable."""
    book = state.leadership
    _refuse_at_end(book)
    known = (request.known_term, request.known_leading)
    if request.wait_ms and known == (book.term, book.leads):
        if state.watchers >= WATCHERS_MAX:
            raise errors.LimitExceeded(f"{WATCHERS_MAX} watches are under way; poll more slowly")
        until_s = min(context.now_s + min(request.wait_ms / 1e3, WATCH_MAX_S), context.deadline_s - _ANSWER_S)
        state.watchers += 1
        try:
            while known == (book.term, book.leads) and (left_s := until_s - state.clock.now_s()) > 0:
                await state.leader_changed(left_s)
                _refuse_at_end(book)
        finally:
            state.watchers -= 1
    return pb.WatchLeadershipResponse(term=book.term, leading=book.leads)


def _refuse_at_end(book: LeadershipBook) -> None:
    """A process that ends is not waited for."""
    if book.has_retired():
        raise errors.ConductorUnavailable("This conductor ends.")
