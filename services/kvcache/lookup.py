"""Asking the pool what it holds, beside the engine's thread.

Idea: a question is a key chain and the number of leading blocks that another instance is computing. A thread asks for
the longest leading run, once. What is awaited and missing is waited for by one parked call (kvcache/watcher.py), which
costs nothing while nothing happens; when it ends without all of them, the pool is asked once more
(core/awaited.py says what follows). Every question ends: with an answer, at its deadline, when no node can be asked, or
because it was withdrawn. The time limit of a question counts from when it was asked: behind others that the pool keeps
waiting it ends with them, not after them.

A pool that stops answering for a moment costs those who await blocks that moment and no more: their questions stay open
for `PATIENCE_S`, in which they are asked again. Otherwise one late answer would have all waiting decode legs compute
their prompts again.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from mooncache.client.keys import KEY_BYTES
from mooncache.client.results import BlockCopy, MatchResult, NodeView, WatchState
from mooncache.errors import DeadlineExceeded, NoNodes
from mooncache.kvcache.core.awaited import AwaitedBlocks, NextStep
from mooncache.kvcache.core.break_even import place_name
from mooncache.kvcache.leg_hint import CacheOutcome
from mooncache.kvcache.pool_link import Call, PoolLink
from mooncache.kvcache.watcher import Watcher
from mooncache.runtime import tracing

TIMEOUT_S = 1.0  # of one question; no answer is a miss
PATIENCE_S = 5.0  # with a pool that was reached once: most prompts take less than that to compute
RETRY_S = 0.1  # after a pool that does not answer was asked


class LookupOutcome(StrEnum):
    """How a question to the pool ended."""

    FOUND = "found"
    TIMEOUT = "timeout"
    ABSENT = "pool_absent"
    FAILED = "failed"
    LATE = "late"
    """The pool did not answer within the question's own limit."""

    def reported(self) -> CacheOutcome:
        """What a cache report says of it; an answer alone says nothing yet."""
        if self is LookupOutcome.LATE:
            return CacheOutcome.FAILED
        return CacheOutcome.UNKNOWN if self is LookupOutcome.FOUND else CacheOutcome(self)


@dataclass(frozen=True, slots=True)
class LookupRequest:
    """One question to the pool: which leading blocks of a chain it holds."""

    name: str
    keys: bytes  # the chain, 32 bytes each
    awaited: int = 0  # leading keys to wait for until `deadline_s`
    deadline_s: float = 0.0  # of the monotonic clock
    trace: tracing.TraceContext | None = None  # the request's, when it has one
    node: str = ""  # where the awaited blocks will be, when that is known
    limit_s: float = TIMEOUT_S  # for the pool's answer: asking may not cost more than it can save
    with_places: bool = False  # whether to say where blocks lie
    session_token: str = field(
        default="", repr=False
    )  # whose blocks are meant; empty: the engine's own tenant


@dataclass(frozen=True, slots=True)
class LookupResult:
    """`present[i]`: the pool holds key i. `places[i]`: the node that it would be read from, with its tier, or "";
    empty when that was not asked. `outcome`: found, timeout (awaited keys are missing), pool_absent, failed, late.
    """

    present: tuple[bool, ...]
    outcome: LookupOutcome
    at_s: float
    waited_s: float = 0.0
    places: tuple[str, ...] = ()

    @property
    def reason(self) -> str:
        """For people, when the pool was not waited for."""
        if self.outcome is not LookupOutcome.LATE:
            return ""
        return f"not loaded: the pool did not say within {self.waited_s * 1e3:.0f} ms what it has"


@dataclass(slots=True)
class _Waiting:
    question: LookupRequest
    asked_s: float
    span: tracing.Span
    present: tuple[bool, ...] = ()
    places: tuple[str, ...] = ()
    awaited: AwaitedBlocks | None = None  # once the pool has answered
    watch: int = 0  # number of the wait that is under way
    retry_s: float | None = None

    def answer(self, outcome: LookupOutcome) -> LookupResult:
        """The answer now, with what is known to be present."""
        self.span.set(kvcache__found_blocks=sum(self.present), kvcache__reason=outcome)
        self.span.end()
        now_s = time.monotonic()
        return LookupResult(self.present, outcome, now_s, now_s - self.asked_s, self.places)

    @property
    def failure(self) -> LookupOutcome:
        """What it is called when the pool did not answer in time."""
        if self.question.awaited:
            return LookupOutcome.TIMEOUT
        return LookupOutcome.LATE if self.question.limit_s < TIMEOUT_S else LookupOutcome.FAILED


class Lookups:
    """Lookups in the pool, on their own thread. `take` collects answers; `changed` is set with each new one."""

    def __init__(
        self,
        link: PoolLink,
        *,
        timeout_s: float = TIMEOUT_S,
        retry_s: float = RETRY_S,
        patience_s: float = PATIENCE_S,
        changed: threading.Event | None = None,
        watcher: Watcher | None = None,
    ) -> None:
        """`watcher`: waits for awaited blocks; it is shared where the same process also streams loads."""
        self._link = link
        self._watcher = watcher or Watcher(link)
        self._owns_watcher = watcher is None
        self._timeout_s = timeout_s
        self._retry_s = retry_s
        self._patience_s = patience_s
        self._failing_since_s: float | None = None  # None: the last call was answered
        self.changed = changed or threading.Event()
        self._lock = threading.Condition()
        self._due: deque[_Waiting] = deque()  # to be asked
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
            self._unwatch(self._open.get(question.name))
            self._open[question.name] = waiting
            self._due.append(waiting)
            self._lock.notify()

    def take(self, name: str) -> LookupResult | None:
        """The answer, once; None while there is none. What the thread has no time for ends here."""
        with self._lock:
            waiting = self._open.get(name)
            if waiting is not None and time.monotonic() > self._over_s(waiting):
                del self._open[name]
                self._unwatch(waiting)
                return waiting.answer(waiting.failure)
            return self._answers.pop(name, None)

    def _over_s(self, waiting: _Waiting) -> float:
        """When a question has had its time; a last look at what was awaited may begin at its deadline."""
        limit_s = min(self._timeout_s, waiting.question.limit_s)
        return max(waiting.asked_s, waiting.question.deadline_s) + limit_s

    def withdraw(self, name: str) -> None:
        """Forget a question and its answer."""
        with self._lock:
            waiting = self._open.pop(name, None)
            self._unwatch(waiting)
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
            for waiting in self._open.values():
                self._unwatch(waiting)
            self._open.clear()
            self._due.clear()
            self._lock.notify()
        self._thread.join(self._timeout_s + 1.0)
        if self._owns_watcher:
            self._watcher.close()

    def _unwatch(self, waiting: _Waiting | None) -> None:
        if waiting is not None and waiting.watch:
            self._watcher.remove(waiting.watch)
            waiting.watch = 0

    # --- the thread ------------------------------------------------------------------------------------------

    def _run(self) -> None:
        while True:
            with self._lock:
                while not self._due and not self._closed:
                    self._lock.wait(self._until_retry_s())
                    self._take_retries()
                if self._closed:
                    return
                waiting = self._due.popleft()
            self._match(waiting)

    def _until_retry_s(self) -> float | None:
        """Seconds until a question is asked again; None: until something happens."""
        retries = [waiting.retry_s for waiting in self._open.values() if waiting.retry_s is not None]
        return max(0.0, min(retries) - time.monotonic()) if retries else None

    def _take_retries(self) -> None:
        now_s = time.monotonic()
        for waiting in self._open.values():
            if waiting.retry_s is not None and now_s >= waiting.retry_s:
                waiting.retry_s = None
                self._due.append(waiting)

    def _finish(self, waiting: _Waiting, outcome: LookupOutcome) -> None:
        with self._lock:
            if self._open.get(waiting.question.name) is not waiting:
                return  # withdrawn or asked anew
            del self._open[waiting.question.name]
            self._unwatch(waiting)
            self._answers[waiting.question.name] = waiting.answer(outcome)
        self.changed.set()

    def _match(self, waiting: _Waiting) -> None:
        """Ask for the whole chain; leaves the question open when awaited blocks are missing."""
        with self._lock:
            if self._open.get(waiting.question.name) is not waiting:
                return
        client = self._link.client(waiting.question.session_token)
        if client is None:
            self._no_answer(waiting, LookupOutcome.ABSENT)
            return
        left_s = self._over_s(waiting) - time.monotonic()
        if left_s <= 0:  # others have used its time up
            self._finish(waiting, waiting.failure)
            return
        timeout_s = min(self._timeout_s, left_s)
        try:
            found = client.match(waiting.question.keys, touch=True, timeout_s=timeout_s)
        except Exception as error:  # noqa: BLE001  (a defect must not end the thread: all requests would wait)
            waiting.present = ()
            if isinstance(error, DeadlineExceeded) and waiting.failure is LookupOutcome.LATE:
                self._finish(waiting, LookupOutcome.LATE)  # it had less time than a failure takes
                return
            self._link.failed(Call.LOOKUP, error)
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
        if waiting.question.with_places:
            waiting.places = _places(found, client.nodes())
        self._go_on(waiting, self._looked(waiting))

    def _looked(self, waiting: _Waiting) -> NextStep:
        """What follows from the pool's answer."""
        question, present, now_s = waiting.question, waiting.present, time.monotonic()
        if waiting.awaited is None:
            missing = [at for at in range(question.awaited) if at >= len(present) or not present[at]]
            waiting.awaited = AwaitedBlocks(missing, node=question.node, deadline_s=question.deadline_s)
            step = waiting.awaited.begin(now_s)
            return NextStep.OVER if step is NextStep.LOOK else step
        missing = waiting.awaited.missing
        return waiting.awaited.looked([at for at in missing if at < len(present) and present[at]], now_s)

    def _go_on(self, waiting: _Waiting, step: NextStep) -> None:
        if step is NextStep.DONE:
            self._finish(waiting, LookupOutcome.FOUND)
        elif step is NextStep.OVER:
            self._finish(waiting, LookupOutcome.TIMEOUT)
        elif step is NextStep.RETRY:
            assert waiting.awaited is not None
            self._ask_later(waiting, waiting.awaited.pause_s, waiting.question.deadline_s)
        elif step is NextStep.WATCH:
            self._wait_for(waiting)
        elif step is NextStep.LOOK:
            with self._lock:
                self._due.append(waiting)
                self._lock.notify()

    def _wait_for(self, waiting: _Waiting) -> None:
        """Wait for what is missing, by one call."""
        question, awaited = waiting.question, waiting.awaited
        assert awaited is not None
        watched = awaited.watched
        keys = b"".join(question.keys[at * KEY_BYTES : (at + 1) * KEY_BYTES] for at in watched)

        def heard(positions: Sequence[int], state: WatchState) -> None:
            with self._lock:
                if self._open.get(question.name) is not waiting:
                    return
                waiting.watch = 0
            came = set(watched) if state is WatchState.ALL else {watched[at] for at in positions}
            present = [*waiting.present, *[False] * (question.awaited - len(waiting.present))]
            for at in came:
                present[at] = True
            waiting.present = tuple(present)
            self._go_on(waiting, awaited.heard(came, state))

        with self._lock:
            if self._open.get(question.name) is waiting:
                left_s = max(0.0, awaited.deadline_s - time.monotonic())
                token = question.session_token
                waiting.watch = self._watcher.add(
                    keys, heard, timeout_s=left_s, node=awaited.node, session_token=token
                )

    def _no_answer(self, waiting: _Waiting, outcome: LookupOutcome) -> None:
        """The pool did not answer. A question that awaits blocks of a pool that was reached once is asked again after a
        pause, for a while; any other ends."""
        now_s = time.monotonic()
        if self._failing_since_s is None:
            self._failing_since_s = now_s
        patient_until_s = min(waiting.question.deadline_s, self._failing_since_s + self._patience_s)
        may_wait = waiting.question.awaited and self._link.connected.is_set()
        if not may_wait or now_s >= patient_until_s:
            self._finish(waiting, outcome)
        else:
            self._ask_later(waiting, self._retry_s, patient_until_s)

    def _ask_later(self, waiting: _Waiting, pause_s: float, latest_s: float) -> None:
        with self._lock:
            waiting.retry_s = min(time.monotonic() + pause_s, latest_s)
            self._lock.notify()


def _places(found: MatchResult, nodes: Sequence[NodeView]) -> tuple[str, ...]:
    """Where the leading blocks lie that are there; of a pool with one node also where the others will."""
    names: dict[tuple[BlockCopy, ...], str] = {}
    for copies in found.copies[: found.leading_blocks]:
        if copies not in names:
            names[copies] = place_name(*copies[0]) if copies else ""
    known = tuple(names[copies] for copies in found.copies[: found.leading_blocks])
    if len(nodes) != 1:
        return known
    return known + (place_name(nodes[0].node_id, nodes[0].tier),) * (len(found.present) - len(known))
