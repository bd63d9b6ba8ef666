"""UpdateRequest: what became of a scheduled request."""

from __future__ import annotations

from mooncache import errors
from mooncache.conductor.config import UPDATES_MAX
from mooncache.conductor.messages import PHASES, detail_of, elapsed_of
from mooncache.conductor.state import ConductorState
from mooncache.proto.v1 import conductor_pb2 as pb
from mooncache.runtime.rpc import CallContext


async def handle(
    state: ConductorState, request: pb.UpdateRequestRequest, context: CallContext
) -> pb.UpdateRequestResponse:
    """Take it in with all that follow; repeats are harmless.

    Raises:
        InvalidArgument, DecisionUnknown: of the first that is wrong; the others are taken in all the same.
        TooLarge: too many in one call; none is taken in.
    """
    if len(request.more) >= UPDATES_MAX:
        raise errors.TooLarge(f"{1 + len(request.more)} updates in one call; at most {UPDATES_MAX} are taken")
    wrong: errors.MooncacheError | None = None
    for update in (request, *request.more):
        try:
            _take_in(state, update, context.now_s)
        except errors.MooncacheError as error:
            wrong = wrong or error
    if wrong is not None:
        raise wrong
    return pb.UpdateRequestResponse()


def _take_in(state: ConductorState, request: pb.UpdateRequestRequest, now_s: float) -> None:
    phase = PHASES.get(request.phase)
    if phase is None:
        raise errors.InvalidArgument("the update names no phase")
    detail = detail_of(request.detail_json)
    output_tokens = min(request.output_tokens, 1 << 53)
    learned = state.core.update(
        request.decision_id, phase, elapsed_of(request.elapsed_ms), output_tokens, detail, now_s
    )
    state.instruments.learned(phase, learned)
    if learned.learn is not None:
        state.remember_later(learned.learn)
        learned.learn.keys = learned.learn.content_keys = b""  # up to megabytes that nobody asks for again
