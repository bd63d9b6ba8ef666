"""One asyncio loop on a daemon thread, shared by every sync client of the process.

gRPC's asyncio API wants a loop; a sync client has none. The loop starts with the first client, serves the small
control calls (cluster map, locate) and dies with the process. After a fork the child starts its own.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import os
import threading
from collections.abc import Coroutine
from typing import Any, TypeVar

from mooncache.errors import DeadlineExceeded

T = TypeVar("T")
_SLACK_S = 5.0
_lock = threading.Lock()
_loop: asyncio.AbstractEventLoop | None = None
_owner_pid = 0


def background_loop() -> asyncio.AbstractEventLoop:
    """The process's control loop, started on first use."""
    global _loop, _owner_pid  # noqa: PLW0603 - one per process is the point
    with _lock:
        if _loop is None or _owner_pid != os.getpid():
            _loop = asyncio.new_event_loop()
            _owner_pid = os.getpid()
            threading.Thread(target=_loop.run_forever, name="mooncache-control", daemon=True).start()
        return _loop


def wait_for(coroutine: Coroutine[Any, Any, T], loop: asyncio.AbstractEventLoop, timeout_s: float) -> T:
    """Run a coroutine that bounds itself by `timeout_s` on another thread's loop and wait for its answer.

    Raises:
        DeadlineExceeded: the loop did not answer in time (it is stuck or gone).
    """
    future = asyncio.run_coroutine_threadsafe(coroutine, loop)
    try:
        return future.result(timeout_s + _SLACK_S)
    except concurrent.futures.TimeoutError:
        future.cancel()
        raise DeadlineExceeded(
            f"The control loop did not answer within {timeout_s + _SLACK_S:g} s."
        ) from None
