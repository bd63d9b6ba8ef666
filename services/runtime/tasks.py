"""Small things that every user of asyncio needs: the end of tasks, a wait with a limit."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterable


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
