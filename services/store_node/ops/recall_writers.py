"""RecallWriters: remove what writers wrote, from memory and disks, so that no restart brings it back.

Pages of the native server, one after the other, and passes until one finds nothing: what was on its way between memory
and disks is found by the next pass. What is on its way from another node no longer becomes visible.
"""

from __future__ import annotations

import asyncio
from typing import Final

from mooncache.errors import OK, DeadlineExceeded, Internal, InvalidArgument
from mooncache.proto.v1 import store_node_pb2 as pb
from mooncache.runtime.logs import Event, get_logger
from mooncache.runtime.rpc import CallContext
from mooncache.store_node.state import StoreNodeState
from mooncache.store_node.writers import NodeWriters

WRITERS_PER_CALL_MAX: Final = 256
REFUSE_S_MAX: Final = 86_400
_PAUSE_S: Final = 0.05
_LEFT_S: Final = 0.5
"""For the answer."""

log = get_logger(__name__)


async def handle(
    state: StoreNodeState, request: pb.RecallWritersRequest, context: CallContext
) -> pb.RecallWritersResponse:
    """Recall, as far as the call's time goes. Raises NotLeader, StaleIncarnation, InvalidArgument, Unsupported."""
    state.check_fence(request.fence)
    writers = state.require_writers()
    _check(request)
    receipt = pb.RecallReceipt(node_id=state.identity.node_id)
    is_over = False
    while not is_over:
        found = 0
        for number in request.writer_ids:
            found += await _pass(state, writers, number, request, receipt, context.deadline_s)
        late = state.clock.now_s() + _LEFT_S >= context.deadline_s
        is_over = request.dry_run or found == 0 or late
        if late and found and not request.dry_run:
            receipt.code = DeadlineExceeded.code
        if not is_over:
            await state.clock.sleep(_PAUSE_S)
    if receipt.failed_block_count:
        receipt.code = receipt.code or Internal.code
    receipt.ended_wall_ms = round(state.clock.wall_s() * 1e3)
    if not request.dry_run:
        log.warning(
            Event.NODE_WRITERS_RECALLED,
            writers=[f"{number:016x}" for number in request.writer_ids],
            blocks=receipt.block_count,
            disk_blocks=receipt.disk_block_count,
            code=receipt.code or OK,
        )
    return pb.RecallWritersResponse(receipt=receipt)


def _check(request: pb.RecallWritersRequest) -> None:
    if not 1 <= len(request.writer_ids) <= WRITERS_PER_CALL_MAX or 0 in request.writer_ids:
        raise InvalidArgument(f"writer_ids must hold 1 to {WRITERS_PER_CALL_MAX} numbers, none of them 0.")
    if request.until_unix_s and request.until_unix_s < request.since_unix_s:
        raise InvalidArgument("until_unix_s is before since_unix_s: nothing was written between them.")
    if request.refuse_s > REFUSE_S_MAX:
        raise InvalidArgument(f"refuse_s must be at most {REFUSE_S_MAX}.")


async def _pass(
    state: StoreNodeState,
    writers: NodeWriters,
    number: int,
    request: pb.RecallWritersRequest,
    receipt: pb.RecallReceipt,
    deadline_s: float,
) -> int:
    """One pass over all blocks; returns how many were found."""
    cursor = seen = 0
    while True:
        found = await asyncio.to_thread(
            writers.core.recall,
            number,
            cursor,
            since_unix_s=request.since_unix_s,
            until_unix_s=request.until_unix_s,
            dry_run=request.dry_run,
            refuse_s=request.refuse_s,
        )
        receipt.block_count += found["blocks"]
        receipt.memory_bytes += found["bytes"]
        receipt.held_block_count += found["held_blocks"]
        receipt.disk_block_count += found["disk_blocks"]
        receipt.disk_bytes += found["disk_bytes"]
        receipt.failed_block_count += found["failed_blocks"]
        seen += found["blocks"] + found["disk_blocks"]
        cursor = found["next_cursor"]
        if not cursor:
            return seen
        if state.clock.now_s() + _LEFT_S >= deadline_s:
            return seen + 1  # there may be more
