"""ListDecisions: a page of records, the newest first, for sums over them such as `mooncache cost`."""

from __future__ import annotations

from typing import Final

from mooncache.conductor.state import ConductorState
from mooncache.proto.v1 import conductor_pb2 as pb
from mooncache.runtime.rpc import CallContext

COUNT_MAX: Final = 256
BYTES_MAX: Final = 1 << 20  # a page ends with the record that passes it


async def handle(
    state: ConductorState, request: pb.ListDecisionsRequest, context: CallContext
) -> pb.ListDecisionsResponse:
    """The records that are older than `before`; schedules wait while a page is made, so it is short."""
    answer = pb.ListDecisionsResponse(kept_max=state.core.settings.decision_count_max)
    count = min(request.count or COUNT_MAX, COUNT_MAX)
    size = 0
    for record in state.core.records.older(request.before):
        text = record.to_brief_json()
        answer.records_json.append(text)
        size += len(text)
        if len(answer.records_json) >= count or size >= BYTES_MAX:
            break
    return answer
