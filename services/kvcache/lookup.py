"""Asking the pool what it holds, beside the engine's thread.

Idea: a question is a key chain and the number of leading blocks that another instance is computing. A thread asks for
the longest leading run; while awaited blocks are missing, the *last* awaited key of every question is asked in one
batch per poll, and only a chain whose last key has appeared is matched again. So a hundred waiting requests cost one
call per poll. Every question ends: with an answer, at its deadline, when no node can be asked, or because it was
withdrawn. The time limit of a question counts from when it was asked: behind others that the pool keeps waiting it ends
with them, not after them.

A pool that stops answering for a moment costs those who await blocks that moment and no more: their questions stay open
for `PATIENCE_S`. Otherwise one late answer would have all waiting decode legs compute their prompts again.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from dataclasses import dataclass
from enum import StrEnum

from mooncache.client.keys import KEY_BYTES
from mooncache.errors import NoNodes
from mooncache.kvcache.leg_hint import CacheOutcome
from mooncache.kvcache.pool_link import Call, PoolClient, PoolLink
from mooncache.runtime import tracing

POLL_SHARE, POLL_MAX_S = 0.02, 0.05
TIMEOUT_S = 1.0  # of one question; no answer is a miss
PATIENCE_S = 5.0  # with a pool that was reached once: most prompts take less than that to compute
POLL_S = 0.003  # how soon blocks that another instance saves are seen; see _pause_s


class LookupOutcome(StrEnum):
    """How a question to the pool ended."""

    FOUND = "found"
    TIMEOUT = "timeout"
    ABSENT = "pool_absent"
    FAILED = "failed"

    def reported(self) -> CacheOutcome:
        """What a cache report says of it; an answer alone says nothing yet."""
        return CacheOutcome.UNKNOWN if self is LookupOutcome.FOUND else CacheOutcome(self)


@dataclass(frozen=True, slots=True)
class LookupRequest:
    """One question to the pool: which leading blocks of a chain it holds."""

    name: str
    keys: bytes  # the chain, 32 bytes each
    awaited: int = 0  # leading keys to wait for until `deadline_s`
    deadline_s: float = 0.0  # of the monotonic clock
    trace: tracing.TraceContext | None = None  # the request's, when it has one

    @property
    def last_awaited(self) -> bytes:
        """The key whose block comes last."""
        return self.keys[(self.awaited - 1) * KEY_BYTES : self.awaited * KEY_BYTES]


@dataclass(frozen=True, slots=True)
class LookupResult:
    """`present[i]`: the pool holds key i. `outcome`: found, timeout (awaited keys are missing), pool_absent, failed."""

    present: tuple[bool, ...]
    outcome: LookupOutcome
    at_s: float
    waited_s: float = 0.0


@dataclass(slots=True)
class _Waiting:
    question: LookupRequest
    asked_s: float
    span: tracing.Span
    present: tuple[bool, ...] = ()

    def answer(self, outcome: LookupOutcome) -> LookupResult:
        """The answer now, with what is known to be present."""
        self.span.set(kvcache__found_blocks=sum(self.present), kvcache__reason=outcome)
        self.span.end()
        now_s = time.monotonic()
        return LookupResult(self.present, outcome, now_s, now_s - self.asked_s)


class Lookups:
    """Lookups in the pool, on their own thread. `take` collects answers; `changed` is set with each new one."""

    def __init__(
        self,
        link: PoolLink,
        *,
        timeout_s: float = TIMEOUT_S,
        poll_s: float = POLL_S,
        patience_s: float = PATIENCE_S,
        changed: threading.Event | None = None,
    ) -> None:
        self._link = link
        self._timeout_s = timeout_s
        self._poll_s = poll_s
        self._patience_s = patience_s
        self._failing_since_s: float | None = None  # None: the last call was answered
        self.changed = changed or threading.Event()
        self._lock = threading.Condition()
        self._new: deque[_Waiting] = deque()
        self._open: dict[str, _Waiting] = {}
        self._answers: dict[str, LookupResult] = {}
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="mooncache-lookup", daemon=True)
        self._thread.start()

    def ask(self, question: LookupRequest) -> None:
        """Ask; a question of the same name is replaced and its answer forgotten."""
        blocks = len(question.keys) // KEY_BYTES
        span = tracing.span(
            "kvcache.lookup", kind="client", parent=question.trace, root=False, kvcache__blocks=blocks
        )
        waiting = _Waiting(question, time.monotonic(), span)
        with self._lock:
            self._answers.pop(question.name, None)
            self._open[question.name] = waiting
            self._new.append(waiting)
            self._lock.notify()

    def take(self, name: str) -> LookupResult | None:
        """The answer, once; None while there is none. What the thread has no time for ends here."""
        with self._lock:
            waiting = self._open.get(name)
            if waiting is not None and time.monotonic() > self._over_s(waiting):
                del self._open[name]
                return waiting.answer(
                    LookupOutcome.TIMEOUT if waiting.question.awaited else LookupOutcome.FAILED
                )
            return self._answers.pop(name, None)

    def _over_s(self, waiting: _Waiting) -> float:
        """When a question has had its time; a last look at what was awaited may begin at its deadline."""
        return max(waiting.asked_s, waiting.question.deadline_s) + self._timeout_s

    def withdraw(self, name: str) -> None:
        """Forget a question and its answer."""
        with self._lock:
            waiting = self._open.pop(name, None)
            self._answers.pop(name, None)
        if waiting is not None:
            waiting.span.end()

    @property
    def pending(self) -> int:
        """Questions without an answer yet."""
        with self._lock:
            return len(self._open)

    def close(self) -> None:
        """End the thread; open questions get no answer."""
        with self._lock:
            self._closed = True
            self._open.clear()
            self._new.clear()
            self._lock.notify()
        self._thread.join(self._timeout_s + 1.0)

    # --- the thread ------------------------------------------------------------------------------------------

    def _run(self) -> None:
        polled_s = 0.0
        while True:
            with self._lock:
                while not self._new and not self._closed:
                    if not self._open:
                        self._lock.wait()
                        continue
                    left_s = polled_s + self._pause_s() - time.monotonic()
                    if left_s <= 0 or not self._lock.wait(left_s):
                        break
                if self._closed:
                    return
                waiting = self._new.popleft() if self._new else None
            if waiting is not None:
                self._match(waiting)
            with self._lock:
                due_s = polled_s + self._pause_s()
            if time.monotonic() >= due_s:
                self._poll()
                polled_s = time.monotonic()

    def _pause_s(self) -> float:
        """Time between two looks: short for what was asked just now, a small share of the wait for what takes long."""
        youngest_s = max((waiting.asked_s for waiting in self._open.values()), default=0.0)
        return max(self._poll_s, min(POLL_MAX_S, POLL_SHARE * (time.monotonic() - youngest_s)))

    def _finish(self, waiting: _Waiting, outcome: LookupOutcome) -> None:
        with self._lock:
            if self._open.get(waiting.question.name) is not waiting:
                return  # withdrawn or asked anew
            del self._open[waiting.question.name]
            self._answers[waiting.question.name] = waiting.answer(outcome)
        self.changed.set()

    def _match(self, waiting: _Waiting) -> None:
        """Ask for the whole chain; leaves the question open when awaited blocks are missing."""
        with self._lock:
            if self._open.get(waiting.question.name) is not waiting:
                return
        client = self._link.client()
        if client is None:
            self._no_answer(waiting, LookupOutcome.ABSENT)
            return
        left_s = self._over_s(waiting) - time.monotonic()
        if left_s <= 0:  # others have used its time up
            self._finish(waiting, LookupOutcome.TIMEOUT if waiting.question.awaited else LookupOutcome.FAILED)
            return
        try:
            timeout_s = min(self._timeout_s, left_s)
            found = client.match(waiting.question.keys, touch=True, timeout_s=timeout_s)
        except Exception as error:  # noqa: BLE001  (a defect must not end the thread: all requests would wait)
            self._link.failed(Call.LOOKUP, error)
            waiting.present = ()
            if isinstance(error, NoNodes):  # no node can take what is awaited either
                self._finish(waiting, LookupOutcome.ABSENT)
            else:
                self._no_answer(waiting, LookupOutcome.FAILED)
            return
        self._link.succeeded()
        waiting.present = tuple(found.present) or (True,) * found.leading_blocks
        if found.unreachable_nodes and found.unreachable_nodes >= len(client.nodes()):
            self._no_answer(waiting, LookupOutcome.ABSENT)
            return
        self._failing_since_s = None
        if found.leading_blocks >= waiting.question.awaited:
            self._finish(waiting, LookupOutcome.FOUND)
        elif time.monotonic() >= waiting.question.deadline_s:
            self._finish(waiting, LookupOutcome.TIMEOUT)

    def _no_answer(self, waiting: _Waiting, outcome: LookupOutcome) -> None:
        """The pool did not answer. A question that awaits blocks of a pool that was reached once stays open for a
        while; any other ends."""
        now_s = time.monotonic()
        if self._failing_since_s is None:
            self._failing_since_s = now_s
        patient_until_s = min(waiting.question.deadline_s, self._failing_since_s + self._patience_s)
        may_wait = waiting.question.awaited and self._link.connected.is_set()
        if not may_wait or now_s >= patient_until_s:
            self._finish(waiting, outcome)

    def _poll(self) -> None:
        """One look at everything that is awaited."""
        with self._lock:
            fresh = {id(waiting) for waiting in self._new}
            waiters = [waiting for waiting in self._open.values() if id(waiting) not in fresh]
        if not waiters:
            return
        client = self._link.client()
        if client is None:
            for waiting in waiters:
                self._no_answer(waiting, LookupOutcome.ABSENT)
            return
        appeared = self._appeared(client, waiters)
        if appeared is None:
            for waiting in waiters:
                self._no_answer(waiting, LookupOutcome.FAILED)
            return
        now_s = time.monotonic()
        for waiting, there in zip(waiters, appeared, strict=True):
            if there or self._failing_since_s is not None or now_s >= waiting.question.deadline_s:
                self._match(waiting)

    def _appeared(self, client: PoolClient, waiters: list[_Waiting]) -> list[bool] | None:
        """For each whether its last awaited block is there; None when the pool does not answer."""
        last = [waiting.question.last_awaited for waiting in waiters]
        try:
            return list(client.exists_many(last, timeout_s=self._timeout_s))
        except Exception as error:  # noqa: BLE001  (as above)
            self._link.failed(Call.LOOKUP, error)
            return None
