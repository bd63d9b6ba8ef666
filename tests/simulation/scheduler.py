"""The scheduler of a simulated cluster: one event loop on virtual time that knows which process a callback belongs to.

Every task carries its process in its context. So a process can be stopped (its callbacks are put aside and go on later,
as after SIGSTOP and SIGCONT) or killed (its callbacks never run again, not even a `finally`) at any callback, whatever
its code is doing. What would differ between two runs is taken from the seed or from a counter: the order of callbacks
that are ready, the hashes of tasks and futures (sets of them are iterated), and threads, which are run in place.

Half the time of a seed is spent here. So what asyncio does for every callback is done without checks for a debugger,
other threads or a closed loop.
"""

from __future__ import annotations

import asyncio
import contextvars
import heapq
import itertools
from collections.abc import Callable, Coroutine, Iterable
from typing import Any

from mooncache.testing.virtual_time import VirtualDeadlockError, VirtualTimeLoop

PRUNE_AT = 4096


class Process:
    """One life of a process: what runs in its context."""

    def __init__(self, loop: Scheduler, name: str) -> None:
        self.loop, self.name = loop, name
        self.life = next(loop.lives)
        self.stopped = self.dead = False
        self.stopped_s = 0.0  # in which it has not run, in all
        self._stopped_at_s = 0.0
        self.parked: list[_Callback | _Timer] = []
        self.wall_offset_s = 0.0
        self.rate = 1.0  # at which its clock runs
        self.context = contextvars.Context()
        self.context.run(PROCESS.set, self)

    def spawn(self, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        """A task of this process."""
        return self.loop.create_task(work, context=self.context.copy())

    def run(self, call: Callable[..., Any], *given: Any) -> Any:
        """Call something as this process."""
        return self.context.copy().run(call, *given)

    def stop(self) -> None:
        """SIGSTOP."""
        if not self.stopped:
            self.stopped, self._stopped_at_s = True, self.loop.virtual_now_s

    def go_on(self) -> None:
        """SIGCONT."""
        if self.stopped:
            self.stopped_s += self.loop.virtual_now_s - self._stopped_at_s
        self.stopped = False
        parked, self.parked = self.parked, []
        self.loop.resume(parked)

    def kill(self) -> None:
        """SIGKILL."""
        self.dead = True


PROCESS: contextvars.ContextVar[Process | None] = contextvars.ContextVar("process", default=None)


def current_process() -> Process:
    """The process that runs now."""
    process = PROCESS.get()
    assert process is not None, "this code runs outside of every process"
    return process


class _Task(asyncio.Task):  # type: ignore[type-arg]
    """A task whose hash is its number."""

    __slots__ = ("number",)
    number: int

    def __hash__(self) -> int:
        return self.number


class _Future(asyncio.Future):  # type: ignore[type-arg]
    __slots__ = ("number",)
    number: int

    def __hash__(self) -> int:
        return self.number


class _Callback:
    """A call that is ready, with the methods of `asyncio.Handle` that anything uses."""

    __slots__ = ("args", "call", "context", "is_cancelled")

    def __init__(self, call: Callable[..., Any], args: tuple[Any, ...], context: contextvars.Context) -> None:
        self.call, self.args, self.context = call, args, context
        self.is_cancelled = False

    def cancel(self) -> None:
        self.is_cancelled = True

    def cancelled(self) -> bool:
        return self.is_cancelled


class _Timer(float):
    """A call at a time, with the methods of `asyncio.TimerHandle`. It is its time: a heap compares numbers fast."""

    __slots__ = ("args", "call", "context", "is_cancelled")
    call: Callable[..., Any]
    args: tuple[Any, ...]
    context: contextvars.Context
    is_cancelled: bool

    def cancel(self) -> None:
        self.is_cancelled = True

    def cancelled(self) -> bool:
        return self.is_cancelled

    def when(self) -> float:
        return float(self)


class Scheduler(VirtualTimeLoop):
    """The loop of one simulated cluster. A callback's exception is dropped: what matters is checked at its place."""

    get_debug = staticmethod(bool)  # type: ignore[assignment]  # False, without a call of Python's

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self._numbers = itertools.count(1)
        self.lives = itertools.count(1)
        self._due: list[_Callback | _Timer] = []
        self._timers: list[_Timer] = []
        self._graves: list[_Callback | _Timer] = []
        self._living: list[asyncio.Task[Any]] = []
        self._over = False
        self.callbacks = 0

    def create_task(
        self, coro: Any, *, name: str | None = None, context: contextvars.Context | None = None
    ) -> asyncio.Task[Any]:
        task = _Task.__new__(_Task)
        task.number = next(self._numbers)
        task.__init__(coro, loop=self, name=name, context=context)  # type: ignore[misc]
        self._living.append(
            task
        )  # a killed process's tasks must not end by garbage collection, at any moment
        if len(self._living) > PRUNE_AT:
            self._living = [each for each in self._living if not each.done()]
        return task

    def create_future(self) -> asyncio.Future[Any]:
        future = _Future(loop=self)
        future.number = next(self._numbers)
        return future

    def call_soon(  # type: ignore[override]
        self, callback: Callable[..., Any], *args: Any, context: contextvars.Context | None = None
    ) -> _Callback:
        handle = _Callback(callback, args, contextvars.copy_context() if context is None else context)
        self._due.append(handle)
        return handle

    def call_at(  # type: ignore[override]
        self,
        when: float,
        callback: Callable[..., Any],
        *args: Any,
        context: contextvars.Context | None = None,
    ) -> _Timer:
        timer = _Timer(when)
        timer.call, timer.args, timer.is_cancelled = callback, args, False
        timer.context = contextvars.copy_context() if context is None else context
        heapq.heappush(self._timers, timer)
        return timer

    def call_later(  # type: ignore[override]
        self,
        delay: float,
        callback: Callable[..., Any],
        *args: Any,
        context: contextvars.Context | None = None,
    ) -> _Timer:
        return self.call_at(self.virtual_now_s + delay, callback, *args, context=context)

    def run_in_executor(self, executor: object, func: Callable[..., Any], *args: Any) -> asyncio.Future[Any]:
        """A thread's work, done in place: threads would bring another order into every run."""
        future = self.create_future()
        try:
            future.set_result(func(*args))
        except Exception as error:
            future.set_exception(error)
        return future

    def resume(self, handles: Iterable[_Callback | _Timer]) -> None:
        """Let callbacks that were put aside run now."""
        self._due.extend(handles)

    def _run_once(self) -> None:
        """One round: what is ready now runs in an order of the seed; when nothing is, time moves to the next timer."""
        timers, round_, pop = self._timers, self._due, heapq.heappop
        self._due = []
        while timers and timers[0].is_cancelled:
            pop(timers)
        if not round_ and not self._stopping:  # type: ignore[attr-defined]
            if not timers:
                raise VirtualDeadlockError("every task waits for something that will not come")
            self.virtual_now_s = max(self.virtual_now_s, float(timers[0]))
        now_s = self.virtual_now_s
        while timers and timers[0] <= now_s:
            timer = pop(timers)
            if not timer.is_cancelled:
                round_.append(timer)
        if len(round_) > 1:
            self.rng.shuffle(round_)
        self.callbacks += len(round_)
        for handle in round_:
            if handle.is_cancelled:
                continue
            context = handle.context
            process = context.get(PROCESS)
            if process is None or self._over or not (process.dead or process.stopped):
                try:
                    context.run(handle.call, *handle.args)
                except (SystemExit, KeyboardInterrupt):
                    raise
                except BaseException:
                    pass
            elif process.dead:
                self._graves.append(handle)
            else:
                process.parked.append(handle)

    async def end(self) -> None:
        """The world is over: whatever is left of any process is cancelled and ends."""
        self._over = True
        handles, self._graves = self._graves, []
        self.resume(handles)
        me = asyncio.current_task()
        for _ in range(20):
            left = [task for task in self._living if not task.done() and task is not me]
            if not left:
                return
            for task in left:
                task.cancel()
            await asyncio.wait(left, timeout=1.0)
