"""FindBlocks: which leading blocks of a prompt the pool has now."""

from __future__ import annotations

from mooncache.client.keys import count_keys
from mooncache.conductor.config import KEYS_MAX
from mooncache.conductor.core.decisions import PoolState
from mooncache.conductor.state import ConductorState
from mooncache.proto.v1 import conductor_pb2 as pb
from mooncache.runtime.rpc import CallContext


async def handle(
    state: ConductorState, request: pb.FindBlocksRequest, context: CallContext
) -> pb.FindBlocksResponse:
    """Ask the pool; an answer in which not all nodes took part does not count. Raises InvalidArgument, TooLarge."""
    count_keys(request.keys, KEYS_MAX)
    found = await state.pool.match(request.keys)
    whole = found.state == PoolState.OK and not found.unreachable_nodes
    return pb.FindBlocksResponse(known=whole, leading_blocks=found.blocks)
