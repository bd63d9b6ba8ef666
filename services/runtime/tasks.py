"""Small things that every user of asyncio needs: the end of tasks, a wait with a limit."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterable
from typing import TypeVar

Result = TypeVar("Result")


async def cancel_all(tasks: Iterable[asyncio.Task[object]]) -> None:
    """Cancel the tasks and wait until they are gone. Their errors are dropped."""
    ending = list(tasks)
    for task in ending:
        task.cancel()
    await asyncio.gather(*ending, return_exceptions=True)


async def wait_for_event(event: asyncio.Event, timeout_s: float) -> None:
    """Wait for an event, `timeout_s` at most."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(timeout_s):
            await event.wait()


def is_cancelling() -> bool:
    """Whether the running task itself was cancelled. Libraries raise CancelledError for reasons of their own, too."""
    return cancellations() > 0


def cancellations() -> int:
    """How often the running task was cancelled so far; what it does in the end of one may be cancelled once more."""
    task = asyncio.current_task()
    return task.cancelling() if task is not None else 0


async def uninterrupted(task: asyncio.Task[Result]) -> Result:
    """The task's result. When the caller is cancelled the task goes on, and its error is dropped.

    Raises what the task raises.
    """
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        task.add_done_callback(_drop_error)
        raise


def _drop_error(task: asyncio.Task[Result]) -> None:
    if not task.cancelled():
        task.exception()
