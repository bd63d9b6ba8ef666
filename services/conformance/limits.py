"""Calls that may be refused or may hang. One that hangs goes on in a thread of its own; nothing waits for it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from mooncache.conformance.core.verdicts import NotOfferedError, PromiseBrokenError

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Attempt(Generic[T]):
    """How a call ended that may be refused: by its answer, or by whatever the store raised."""

    answer: T | None = None
    refusal: Exception | None = None

    @property
    def ended(self) -> str:
        """ "done", or the name of what was raised."""
        return "done" if self.refusal is None else type(self.refusal).__name__


def attempt(call: Callable[[], T]) -> Attempt[T]:
    """Call it. What is raised is a refusal, but for PromiseBrokenError and NotOfferedError, which pass."""
    try:
        return Attempt(answer=call())
    except (PromiseBrokenError, NotOfferedError):
        raise
    except Exception as error:  # noqa: BLE001 - a store under test raises what it likes
        return Attempt(refusal=error)


def within(limit_s: float, what: str, call: Callable[[], T]) -> T:
    """What the call answers or raises.

    Raises:
        PromiseBrokenError: it has not ended within the limit.
    """
    answers: list[T] = []
    errors: list[BaseException] = []

    def work() -> None:
        try:
            answers.append(call())
        except BaseException as error:  # noqa: BLE001 - raised again where it is waited for
            errors.append(error)

    thread = threading.Thread(target=work, name=f"conformance {what}", daemon=True)
    thread.start()
    thread.join(limit_s)
    if thread.is_alive():
        raise PromiseBrokenError(f"{what} has not ended after {limit_s:g} s")
    if errors:
        raise errors[0]
    return answers[0]


def together(limit_s: float, what: str, works: Sequence[Callable[[], object]]) -> None:
    """Run all of them at the same time, and wait.

    Raises:
        PromiseBrokenError: one has not ended within the limit.
        Exception: what the first one raised.
    """
    errors: list[BaseException] = []

    def guarded(work: Callable[[], object]) -> None:
        try:
            work()
        except BaseException as error:  # noqa: BLE001 - raised again by the caller
            errors.append(error)

    threads = [threading.Thread(target=guarded, args=(work,), name=what, daemon=True) for work in works]
    for thread in threads:
        thread.start()

    def wait() -> None:
        for thread in threads:
            thread.join()

    within(limit_s, what, wait)
    if errors:
        raise errors[0]
