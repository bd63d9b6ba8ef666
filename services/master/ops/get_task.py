"""GetTask: state of one task."""

from __future__ import annotations

from mooncache import errors
from mooncache.master.messages import task_message
from mooncache.master.state import MasterState
from mooncache.proto.v1 import master_pb2
from mooncache.runtime.rpc import CallContext


async def handle(
    state: MasterState, request: master_pb2.GetTaskRequest, context: CallContext
) -> master_pb2.GetTaskResponse:
    """The task.

    Raises NotLeader, TaskUnknown (also for tasks of other tenants: their ids are not revealed).
    """
    state.require_leading()
    task = state.tasks.require(request.task_id)
    if not context.admin and task.tenant != context.tenant:
        raise errors.TaskUnknown(f"no task {request.task_id!r} of tenant {context.tenant!r}")
    return master_pb2.GetTaskResponse(task=task_message(task, context.now_s))
