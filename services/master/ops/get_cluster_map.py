"""GetClusterMap: the current map."""

from __future__ import annotations

from mooncache.master.state import MasterState
from mooncache.proto.v1 import master_pb2
from mooncache.runtime.rpc import CallContext


async def handle(
    state: MasterState, request: master_pb2.GetClusterMapRequest, context: CallContext
) -> master_pb2.GetClusterMapResponse:
    """The map. Raises NotLeader."""
    state.require_leading()
    return master_pb2.GetClusterMapResponse(map=state.cluster_map())
