"""Waits for blocks at the nodes that will have them: one watch and one thread for all waits of one tenant's client.

Idea: a wait is a parked call that costs nothing while nothing happens. One thread receives what nodes answer, and calls
functions of the waits, which must not block. A wait ends exactly once, unless it is removed: also without a pool, when
the client breaks, and when a node says nothing for a while after the time limit.
"""

from __future__ import annotations

import heapq
import itertools
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from mooncache.client.results import WatchState
from mooncache.errors import Closed, LimitExceeded, UnknownNode
from mooncache.kvcache.pool_link import Call, PoolLink
from mooncache.runtime.logs import Event, get_logger

if TYPE_CHECKING:
    from mooncache.client.watch import BlockWatch

SILENCE_S: Final = 0.5
"""So long after its time limit a wait ends without its node."""
WAIT_MAX_S: Final = 500.0
"""Of one call; nodes know a limit too, and a longer wait goes on with another call."""
WATCHERS_KEPT: Final = 64
"""Of tenants; one that waits is kept anyway."""
_LEFT_MIN_S: Final = 0.001
_TURN_MAX_S: Final = 1.0

_log = get_logger(__name__)

Heard = Callable[[Sequence[int], WatchState], None]
"""Takes positions of keys that became readable, and how the wait goes on. Called on the watcher's thread."""


@dataclass(slots=True)
class _Wait:
    keys: bytes
    heard: Heard
    deadline_s: float
    node: str
    news_s: float


class Watcher:
    """Waits for blocks of all tenants. Thread-safe; the wait of a session token ends at the client of that token."""

    def __init__(self, link: PoolLink) -> None:
        self._link = link
        self._lock = threading.Lock()
        self._numbers = itertools.count(1)
        self._own = _ClientWatcher(link, self._numbers, "")
        self._tenants: OrderedDict[str, _ClientWatcher] = OrderedDict()  # longest unused first
        self._closed = False

    def add(
        self,
        keys: bytes,
        heard: Heard,
        *,
        timeout_s: float,
        node: str = "",
        news_s: float = 0.0,
        session_token: str = "",
    ) -> int:
        """Wait for these keys at a node, or at any node; returns the wait's number.

        Args:
            news_s: how often to hear of blocks that came; 0: only the end.
            session_token: whose blocks they are; empty: the engine's own tenant.
        """
        watcher, unused = self._of(session_token)
        for idle in unused:
            idle.close()
        return watcher.add(keys, heard, timeout_s=timeout_s, node=node, news_s=news_s)

    def remove(self, number: int) -> None:
        """Forget a wait. Its function may be called once more if that has begun."""
        for watcher in self._all():
            watcher.remove(number)

    def later(self, pause_s: float, call: Callable[[], None]) -> None:
        """Call a function on a watcher's thread after a pause, unless it is closed before."""
        self._own.later(pause_s, call)

    @property
    def waiting(self) -> int:
        """Waits that have not ended."""
        return sum(watcher.waiting for watcher in self._all())

    def close(self, timeout_s: float = 5.0) -> None:
        """End the threads; what still waits hears nothing."""
        with self._lock:
            self._closed = True
        for watcher in self._all():
            watcher.close(timeout_s)

    def _all(self) -> list[_ClientWatcher]:
        with self._lock:
            return [self._own, *self._tenants.values()]

    def _of(self, session_token: str) -> tuple[_ClientWatcher, list[_ClientWatcher]]:
        """The watcher of a token, and those that make room for it: nothing waits there."""
        if not session_token:
            return self._own, []
        with self._lock:
            found = self._tenants.get(session_token)
            if found is not None:
                self._tenants.move_to_end(session_token)
                return found, []
            found = _ClientWatcher(self._link, self._numbers, session_token)
            unused: list[_ClientWatcher] = []
            for token, watcher in list(self._tenants.items()):
                if len(self._tenants) < WATCHERS_KEPT:
                    break
                if not watcher.waiting:
                    unused.append(self._tenants.pop(token))
            if self._closed:
                found.close()
            else:
                self._tenants[session_token] = found
            return found, unused


class _ClientWatcher:
    """Waits for blocks over one client. Thread-safe; its thread begins with the first wait."""

    def __init__(self, link: PoolLink, numbers: Iterator[int], session_token: str) -> None:
        self._link = link
        self._session_token = session_token
        self._lock = threading.Condition()
        self._numbers = numbers
        self._waits: dict[int, _Wait] = {}
        self._new: deque[int] = deque()
        self._removed: deque[int] = deque()
        self._timers: list[tuple[float, int, Callable[[], None]]] = []
        self._watch: BlockWatch | None = None
        self._unsent = False  # nodes have not heard of an end yet: a watch sends in `next` only
        self._closed = False
        self._thread: threading.Thread | None = None

    def add(self, keys: bytes, heard: Heard, *, timeout_s: float, node: str, news_s: float) -> int:
        """As `Watcher.add`."""
        with self._lock:
            number = next(self._numbers)
            self._waits[number] = _Wait(keys, heard, time.monotonic() + timeout_s, node, news_s)
            self._new.append(number)
            self._wake()
        return number

    def remove(self, number: int) -> None:
        """As `Watcher.remove`; a number of another watcher is ignored."""
        with self._lock:
            if self._waits.pop(number, None) is not None:
                self._removed.append(number)
                self._wake()

    def later(self, pause_s: float, call: Callable[[], None]) -> None:
        """As `Watcher.later`."""
        with self._lock:
            heapq.heappush(self._timers, (time.monotonic() + pause_s, next(self._numbers), call))
            self._wake()

    @property
    def waiting(self) -> int:
        """Waits that have not ended."""
        with self._lock:
            return len(self._waits)

    def close(self, timeout_s: float = 5.0) -> None:
        """As `Watcher.close`."""
        with self._lock:
            self._closed = True
            self._waits.clear()
            self._timers.clear()
            self._wake()
            thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join(timeout_s)

    def _wake(self) -> None:
        if self._thread is None and not self._closed:
            self._thread = threading.Thread(target=self._run, name="mooncache-watch", daemon=True)
            self._thread.start()
        self._lock.notify()
        if self._watch is not None:
            self._watch.wake()

    # --- the thread ------------------------------------------------------------------------------------------

    def _run(self) -> None:
        while True:
            with self._lock:
                while not (self._waits or self._removed or self._timers or self._unsent or self._closed):
                    self._lock.wait()
                if self._closed:
                    break
                new = [number for number in self._new if number in self._waits]
                removed = list(self._removed)
                self._new.clear()
                self._removed.clear()
            self._register(new, removed)
            self._hear()
            self._end_overdue()
        self._drop_watch()

    def _register(self, new: list[int], removed: list[int]) -> None:
        watch = self._watch
        if watch is not None and removed:
            self._guarded(lambda: [watch.remove(str(number)) for number in removed])
            self._unsent = True
        for number in new:
            with self._lock:
                wait = self._waits.get(number)
            if wait is not None and not self._begin(number, wait):
                self._call(number, (), WatchState.UNREACHABLE)

    def _begin(self, number: int, wait: _Wait) -> bool:
        """Register a wait; False when there is no pool."""
        try:
            if self._watch is None:
                client = self._link.client(self._session_token)
                if client is None:
                    return False
                watch = client.watch()
                with self._lock:
                    self._watch = watch
            left_s = min(WAIT_MAX_S, max(_LEFT_MIN_S, wait.deadline_s - time.monotonic()))
            self._watch.add(
                str(number), wait.keys, timeout_s=left_s, node=wait.node or None, news_s=wait.news_s
            )
        except (UnknownNode, LimitExceeded):  # no failure of the pool: it cannot be waited for in this way
            return False
        except Exception as error:  # noqa: BLE001  (a defect must not end the thread: all waits would hang)
            self._link.failed(Call.LOOKUP, error)
            return False
        return True

    def _hear(self) -> None:
        """Wait for news until the next timer or time limit, and pass them on."""
        with self._lock:
            watch = self._watch
            due_s = min(
                [wait.deadline_s + SILENCE_S for wait in self._waits.values()]
                + [at_s for at_s, _, _ in self._timers[:1]],
                default=0.0,
            )
            pause_s = min(_TURN_MAX_S, max(_LEFT_MIN_S, due_s - time.monotonic()))
            if watch is not None and not self._waits and self._unsent:
                pause_s = _LEFT_MIN_S
            elif watch is None or not self._waits:
                if not (self._new or self._removed or self._closed):
                    self._lock.wait(pause_s)
                self._unsent = False
                return
            self._unsent = False
        try:
            news = watch.next(pause_s)
        except Exception as error:  # noqa: BLE001  (as above)
            if not isinstance(error, Closed):
                self._link.failed(Call.LOOKUP, error)
            self._drop_watch()
            with self._lock:
                numbers = list(self._waits)
            for number in numbers:
                self._call(number, (), WatchState.UNREACHABLE)
            return
        for each in news:
            self._call(int(each.name), each.positions, each.state)

    def _end_overdue(self) -> None:
        """Timers, and waits whose node says nothing after their time limit."""
        now_s = time.monotonic()
        with self._lock:
            late = [number for number, wait in self._waits.items() if now_s >= wait.deadline_s + SILENCE_S]
            calls = []
            while self._timers and self._timers[0][0] <= now_s:
                calls.append(heapq.heappop(self._timers)[2])
            self._removed.extend(late)
        for number in late:
            self._call(number, (), WatchState.TIMEOUT)
        for call in calls:
            self._guarded(call)

    def _call(self, number: int, positions: Sequence[int], state: WatchState) -> None:
        with self._lock:
            wait = self._waits.get(number)
            if wait is not None and state is not WatchState.MORE:
                del self._waits[number]
                self._unsent = True
        if wait is not None:
            self._guarded(lambda: wait.heard(positions, state))

    @staticmethod
    def _guarded(call: Callable[[], object]) -> None:
        try:
            call()
        except Exception as error:  # noqa: BLE001  (as above)
            _log.error(Event.CONNECTOR_DEFECT, where="watcher", reason=repr(error), exc_info=error)

    def _drop_watch(self) -> None:
        with self._lock:
            watch, self._watch = self._watch, None
            self._removed.clear()
        if watch is not None:
            try:
                watch.close()
            except Exception as error:  # noqa: BLE001  (as above)
                self._link.failed(Call.LOOKUP, error)
