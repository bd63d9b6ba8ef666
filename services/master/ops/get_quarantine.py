"""GetQuarantine: which writers are quarantined, as this master knows it."""

from __future__ import annotations

from mooncache.master.state import MasterState
from mooncache.proto.v1 import master_pb2
from mooncache.runtime.quarantine_messages import quarantine_message
from mooncache.runtime.rpc import CallContext


async def handle(
    state: MasterState, request: master_pb2.GetQuarantineRequest, context: CallContext
) -> master_pb2.GetQuarantineResponse:
    """The table, also with released writers. Raises NotLeader."""
    state.require_leading()
    return master_pb2.GetQuarantineResponse(table=quarantine_message(state.quarantine))
