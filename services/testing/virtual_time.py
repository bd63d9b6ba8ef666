"""An asyncio event loop on virtual time: hours of timers in milliseconds, the same run for the same seed.

Idea: the loop's selector never waits for the operating system. When nothing is ready it moves the clock to
the next timer. Before each round the ready callbacks are shuffled by a seeded generator, so that different
seeds try different interleavings. Real I/O, threads and child processes are refused: they would bring real
time back in.

Leans on asyncio privates, `BaseEventLoop._ready`, `_run_once`, `_selector` and `_clock_resolution`;
tests/testing/test_virtual_time.py says so by name when a Python version changes them.
"""

from __future__ import annotations

import asyncio
import random
from collections import deque
from collections.abc import Callable, Coroutine
from typing import Any, NoReturn, TypeVar

T = TypeVar("T")

_REFUSED = (
    "add_reader",
    "add_writer",
    "remove_reader",
    "remove_writer",
    "connect_read_pipe",
    "connect_write_pipe",
    "create_connection",
    "create_datagram_endpoint",
    "create_server",
    "create_unix_connection",
    "create_unix_server",
    "getaddrinfo",
    "getnameinfo",
    "run_in_executor",
    "sendfile",
    "sock_accept",
    "sock_connect",
    "sock_recv",
    "sock_recv_into",
    "sock_recvfrom",
    "sock_sendall",
    "sock_sendfile",
    "sock_sendto",
    "start_tls",
    "subprocess_exec",
    "subprocess_shell",
    "add_signal_handler",
    "call_soon_threadsafe",
)


class VirtualDeadlockError(RuntimeError):
    """Nothing is ready and no timer is set: the program would wait forever."""


class RealIoRefusedError(RuntimeError):
    """Code under virtual time asked for a socket, thread, process or signal."""


class _VirtualSelector:
    """Stands in for the selector: 'waiting' moves the loop's clock."""

    def __init__(self, loop: VirtualTimeLoop) -> None:
        self._loop = loop

    def select(self, timeout: float | None) -> list[object]:
        if timeout is None:
            raise VirtualDeadlockError(
                "every task waits for something that no timer and no other task will bring"
            )
        if timeout > 0:
            self._loop.virtual_now_s += timeout
        return []


class VirtualTimeLoop(asyncio.BaseEventLoop):
    """An asyncio event loop on virtual time. `virtual_now_s` is what `time()` returns."""

    _ready: deque[asyncio.Handle]

    def __init__(self, seed: int = 0, start_s: float = 0.0) -> None:
        super().__init__()
        self.virtual_now_s = start_s
        self.rng = random.Random(seed)
        self._selector = _VirtualSelector(self)
        self._clock_resolution = 1e-9

    def time(self) -> float:
        return self.virtual_now_s

    def _run_once(self) -> None:
        if len(self._ready) > 1:
            handles = list(self._ready)
            self.rng.shuffle(handles)
            self._ready.clear()
            self._ready.extend(handles)
        super()._run_once()  # type: ignore[misc]

    def _process_events(self, event_list: list[object]) -> None:
        """No events ever come."""

    def _write_to_self(self) -> None:
        """No other thread ever has to wake this loop."""


def _refuse(name: str) -> Callable[..., NoReturn]:
    def refused(self: VirtualTimeLoop, *_args: object, **_kwargs: object) -> NoReturn:
        raise RealIoRefusedError(f"{name} would bring real time in; use a MemoryNetwork and a LoopClock")

    return refused


for _name in _REFUSED:
    setattr(VirtualTimeLoop, _name, _refuse(_name))


def run(main: Coroutine[Any, Any, T], seed: int = 0) -> T:
    """Run a coroutine to its end on a fresh virtual loop; the tasks that it left behind are cancelled.

    Raises VirtualDeadlockError when everything waits forever, RealIoRefusedError when something asked for
    real I/O.
    """
    with asyncio.Runner(loop_factory=lambda: VirtualTimeLoop(seed)) as runner:
        return runner.run(main)
