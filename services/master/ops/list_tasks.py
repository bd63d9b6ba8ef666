"""ListTasks: known tasks, newest first, in pages."""

from __future__ import annotations

from mooncache import errors
from mooncache.master.messages import TASK_KINDS, task_message
from mooncache.master.state import MasterState
from mooncache.proto.v1 import master_pb2
from mooncache.runtime.rpc import CallContext

PAGE_SIZE_DEFAULT = 100
_TOKEN_DIGITS_MAX = 18


async def handle(
    state: MasterState, request: master_pb2.ListTasksRequest, context: CallContext
) -> master_pb2.ListTasksResponse:
    """One page; a tenant sees its own tasks only. Raises NotLeader, InvalidArgument."""
    state.require_leading()
    kinds = {message: kind for kind, message in TASK_KINDS.items()}
    if request.kind and request.kind not in kinds:
        raise errors.InvalidArgument(f"task kind {request.kind} is not known")
    token = request.page_token
    if token and not (token.isascii() and token.isdigit() and len(token) <= _TOKEN_DIGITS_MAX):
        raise errors.InvalidArgument("page_token must be the next_page_token of the page before")
    size = min(request.page_size or PAGE_SIZE_DEFAULT, state.limits.tasks_page_max)
    tenant = None if context.admin else context.tenant
    tasks = state.tasks.page(
        kinds.get(request.kind), request.active_only, int(token) if token else None, size + 1, tenant
    )
    more = len(tasks) > size
    return master_pb2.ListTasksResponse(
        tasks=[task_message(task, context.now_s) for task in tasks[:size]],
        next_page_token=str(tasks[size - 1].number) if more else "",
    )
