"""One asyncio loop on a daemon thread, shared by every sync client of the process.

gRPC's asyncio API wants a loop; a sync client has none. The loop starts with the first client, serves the small
control calls (cluster map, locate) and dies with the process. A forked child has no part in it.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import os
import threading
from collections.abc import Coroutine
from typing import Any, TypeVar

from mooncache.errors import DeadlineExceeded
from mooncache.runtime.forks import leave_to_parent

T = TypeVar("T")
_SLACK_S = 5.0
_lock = threading.Lock()
_loop: asyncio.AbstractEventLoop | None = None


def _begin_anew() -> None:
    global _lock, _loop  # noqa: PLW0603 - one per process is the point
    _lock = threading.Lock()  # a thread that does not exist here may hold the other
    if _loop is not None:
        leave_to_parent(_loop)  # closing it would change the parent's epoll set
        _loop = None


os.register_at_fork(after_in_child=_begin_anew)


def background_loop() -> asyncio.AbstractEventLoop:
    """The process's control loop, started on first use."""
    global _loop  # noqa: PLW0603 - one per process is the point
    with _lock:
        if _loop is None:
            _loop = asyncio.new_event_loop()
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
