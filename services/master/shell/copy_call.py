"""The call that lets one node fetch blocks from another."""

from __future__ import annotations

from collections.abc import Sequence

from mooncache import errors
from mooncache.master.core.repair_types import RepairStep
from mooncache.master.core.task_types import CopyStep
from mooncache.master.messages import fence, node_info
from mooncache.master.state import MasterState
from mooncache.proto.v1 import store_node_pb2


async def copy_blocks(
    state: MasterState, step: CopyStep | RepairStep, term: int
) -> tuple[Sequence[int], int]:
    """Return a code for each key, and the bytes that moved. `term` is the one under which it was decided.

    Raises NodeUnavailable (a node is no longer known, or does not answer), DeadlineExceeded, the node's refusal.
    """
    source, target = state.membership.by_index(step.source), state.membership.by_index(step.target)
    if source is None or target is None:
        raise errors.NodeUnavailable("the source or the target of a copy is no longer known")
    timeout_s = state.limits.copy_timeout_s
    request = store_node_pb2.CopyBlocksRequest(
        tenant_id=step.tenant_id,
        tenant=state.ledger.names.get(step.tenant_id, ""),
        keys=b"".join(step.keys),
        source=node_info(source),
        timeout_ms=round(timeout_s * 1000),
        fence=fence(term, target),
        spare=step.spare,
        bytes_per_s=round(step.bytes_per_s) if isinstance(step, RepairStep) else 0,
    )
    response = await state.nodes.call(
        target, "CopyBlocks", request, store_node_pb2.CopyBlocksResponse, timeout_s
    )
    return list(response.codes), int(response.copied_bytes)
