"""SetQuarantine: quarantine a writer by an operator's word, or lift its quarantine, on every node."""

from __future__ import annotations

from mooncache.errors import InvalidArgument
from mooncache.master.shell.quarantining import change
from mooncache.master.state import MasterState
from mooncache.proto.v1 import master_pb2
from mooncache.runtime.quarantine import QuarantineEntry
from mooncache.runtime.rpc import CallContext


async def handle(
    state: MasterState, request: master_pb2.SetQuarantineRequest, context: CallContext
) -> master_pb2.SetQuarantineResponse:
    """Change the entry and give it to all living nodes. Raises NotLeader, InvalidArgument."""
    state.require_leading()
    if not request.writer_id:
        raise InvalidArgument("writer_id must be the number of a writer, not 0.")
    known = state.quarantine.entries.get(request.writer_id)
    entry = QuarantineEntry.checked(
        {
            "writer_id": request.writer_id,
            "changed_wall_ms": state.next_change_ms(request.writer_id),
            "instance": request.instance or (known.instance if known else ""),
            "build": request.build or (known.build if known else ""),
            "released": request.released,
            "reason": request.reason,
        }
    )
    state.accusations.forget(request.writer_id)
    return master_pb2.SetQuarantineResponse(node_ids=await change(state, entry))
