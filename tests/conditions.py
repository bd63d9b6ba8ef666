"""Waiting for what another thread or process does: the one bounded loop of the tests.

Tests that wait name the condition and go on as soon as it holds. The bound only keeps a broken program from hanging the
run: a busy machine may take ten times as long as an idle one.
"""

from __future__ import annotations

import asyncio
import inspect
import time
from collections.abc import Awaitable, Callable
from typing import TypeVar

T = TypeVar("T")

WAIT_S = 90.0


def wait_until(
    condition: Callable[[], T],
    what: str | Callable[[], str] = "the condition",
    timeout_s: float = WAIT_S,
    every_s: float = 0.02,
) -> T:
    """Ask until the answer is truthy, and return it. Fails with `what`, which may be a text that is made then."""
    deadline_s = time.monotonic() + timeout_s
    while not (answer := condition()):
        assert time.monotonic() < deadline_s, _failure(what, timeout_s, answer)
        time.sleep(every_s)
    return answer


async def until(
    condition: Callable[[], T | Awaitable[T]],
    what: str | Callable[[], str] = "the condition",
    timeout_s: float = WAIT_S,
    every_s: float = 0.02,
) -> T:
    """The same on an event loop; the condition may be a coroutine function."""
    deadline_s = time.monotonic() + timeout_s
    while True:
        asked = condition()
        answer: T = await asked if inspect.isawaitable(asked) else asked  # type: ignore[assignment]
        if answer:
            return answer
        assert time.monotonic() < deadline_s, _failure(what, timeout_s, answer)
        await asyncio.sleep(every_s)


def _failure(what: str | Callable[[], str], timeout_s: float, answer: object) -> str:
    text = what if isinstance(what, str) else what()
    return f"not within {timeout_s:g} s: {text} (last answer: {answer!r})"
