"""UpdateRequest: what became of a scheduled request."""

from __future__ import annotations

from mooncache import errors
from mooncache.conductor.messages import PHASES, detail_of, elapsed_of
from mooncache.conductor.state import ConductorState
from mooncache.proto.v1 import conductor_pb2 as pb
from mooncache.rpc import CallContext


async def handle(
    state: ConductorState, request: pb.UpdateRequestRequest, context: CallContext
) -> pb.UpdateRequestResponse:
    """Take it in; repeats are harmless. Raises InvalidArgument, DecisionUnknown."""
    phase = PHASES.get(request.phase)
    if phase is None:
        raise errors.InvalidArgument("the update names no phase")
    detail = detail_of(request.detail_json)
    output_tokens = min(request.output_tokens, 1 << 53)
    learned = state.core.update(
        request.decision_id, phase, elapsed_of(request.elapsed_ms), output_tokens, detail, context.now_s
    )
    state.instruments.learned(phase, learned)
    if learned.learn is not None:
        state.remember_later(learned.learn)
        learned.learn.keys = learned.learn.content_keys = b""  # up to megabytes that nobody asks for again
    return pb.UpdateRequestResponse()
