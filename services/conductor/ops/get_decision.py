"""GetDecision: the record of one decision, or of the last one, for people."""

from __future__ import annotations

import random

from mooncache import errors
from mooncache.conductor.core.what_if import other_choice
from mooncache.conductor.state import ConductorState
from mooncache.proto.v1 import conductor_pb2 as pb
from mooncache.runtime.rpc import CallContext


async def handle(
    state: ConductorState, request: pb.GetDecisionRequest, context: CallContext
) -> pb.GetDecisionResponse:
    """The record with its misses explained. Raises DecisionUnknown, InvalidArgument."""
    await state.work_off()
    records = state.core.records
    record = records.find(request.id) if request.id else records.newest()
    if record is None and not request.id:
        raise errors.DecisionUnknown("No request has been scheduled here yet.")
    if record is None:
        raise errors.DecisionUnknown(
            f"No decision {request.id[:64]!r} is kept here; the last {state.core.settings.decision_count_max} are."
        )
    core = state.core
    core.keep_candidates(record)
    more: dict[str, object] = {}
    if request.policy:
        rng = random.Random(record.decision_id)
        try:
            more["what_if"] = other_choice(record, core.snapshots, core.settings.rules, request.policy, rng)
        except ValueError as unknown:
            raise errors.InvalidArgument(str(unknown)) from None
    return pb.GetDecisionResponse(record_json=record.to_json(core.settings.rules, more))
