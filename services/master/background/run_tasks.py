"""Duty: carry out what the tasks plan: copies, drops, and asking a draining node for its contents.

Invariant: every step that was taken from the book is answered exactly once, also when its call fails or is cut off.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from mooncache import errors
from mooncache.master.core.task_types import CopyStep, DropStep, TaskStep
from mooncache.master.core.tasks import TaskBook
from mooncache.master.messages import fence
from mooncache.master.shell.copy_call import copy_blocks
from mooncache.master.state import MasterState
from mooncache.proto.v1 import store_node_pb2
from mooncache.runtime.logs import Event, get_logger
from mooncache.runtime.tasks import cancel_all

log = get_logger(__name__)


class TaskRunner:
    """Runs steps beside each other; the book bounds how many."""

    def __init__(self, state: MasterState) -> None:
        self._state = state
        self._calls: set[asyncio.Task[None]] = set()
        self._logged: set[str] = set()

    async def run_once(self) -> None:
        """Plan and start what may be started now."""
        state = self._state
        for effect in state.tasks.tick(state, state.clock.now_s()):
            if isinstance(effect, CopyStep | DropStep):
                call = asyncio.create_task(self._carry_out(state.tasks, effect, state.membership.term))
                self._calls.add(call)
                call.add_done_callback(self._calls.discard)
            else:
                state.directory.listen(effect.node)
        self._log_finished(state.tasks)

    async def stop(self) -> None:
        """Cut off what is under way."""
        await cancel_all(self._calls)

    async def _carry_out(self, book: TaskBook, step: TaskStep, term: int) -> None:
        kind = "copy" if isinstance(step, CopyStep) else "drop"
        codes: Sequence[int] = [errors.Cancelled.code] * len(step.keys)
        copied_bytes = 0
        try:
            if isinstance(step, CopyStep):
                codes, copied_bytes = await copy_blocks(self._state, step, term)
            else:
                codes = await self._drop(step, term)
            if len(codes) != len(step.keys):
                codes = [errors.ProtocolError.code] * len(step.keys)
        except errors.MooncacheError as error:
            codes = [error.code] * len(step.keys)
        finally:
            instruments = self._state.instruments
            for code in set(codes):
                instruments.steps.labels(kind, errors.code_name(code)).inc()
            instruments.copied_bytes.inc(copied_bytes)
            book.on_step(step.step_id, codes, copied_bytes, self._state.clock.now_s())

    async def _drop(self, step: DropStep, term: int) -> Sequence[int]:
        state = self._state
        node = state.membership.by_index(step.node)
        if node is None:
            raise errors.NodeUnavailable("the node of a drop is no longer known")
        request = store_node_pb2.DropBlocksRequest(
            tenant_id=step.tenant_id,
            keys=b"".join(step.keys),
            reason=store_node_pb2.DROP_REASON_DRAINED,
            fence=fence(term, node),
        )
        response = await state.nodes.call(
            node, "DropBlocks", request, store_node_pb2.DropBlocksResponse, state.limits.node_call_timeout_s
        )
        return list(response.codes)

    def _log_finished(self, book: TaskBook) -> None:
        for task in book.tasks.values():
            if task.over and task.task_id not in self._logged:
                self._logged.add(task.task_id)
                log.info(
                    Event.TASK_FINISHED,
                    task_id=task.task_id,
                    state=task.state.value,
                    code=errors.code_name(task.code),
                    done_block_count=task.done_count,
                    failed_block_count=task.failed_count,
                )
        self._logged.intersection_update(book.tasks)
