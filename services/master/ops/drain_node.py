"""DrainNode: start a task that empties a node before it leaves, or call one off."""

from __future__ import annotations

from mooncache.master.state import MasterState
from mooncache.proto.v1 import master_pb2
from mooncache.runtime.logs import Event, get_logger
from mooncache.runtime.rpc import CallContext

log = get_logger(__name__)


async def handle(
    state: MasterState, request: master_pb2.DrainNodeRequest, context: CallContext
) -> master_pb2.DrainNodeResponse:
    """Start or cancel.

    The node hears of it with its next heartbeat. Raises NotLeader, UnknownNode, LimitExceeded.
    """
    state.require_leading()
    node = state.membership.require(request.node_id)
    task_id = ""
    if request.cancel:
        state.tasks.cancel_drain(node.index)
        state.directory.stop_listening(node.index)
    else:
        task = state.tasks.drain(node.index, node.node_id, request.move_blocks, context.now_s)
        task_id = task.task_id
        log.info(Event.DRAIN_STARTED, node_id=node.node_id, task_id=task_id, move_blocks=request.move_blocks)
    state.apply(state.membership.set_drain(node.node_id, not request.cancel, context.now_s))
    return master_pb2.DrainNodeResponse(task_id=task_id)
