"""The engine's side of the pool, and the only place that calls the SDK.

Idea: the engine's thread never waits for the pool. It hands over lookups, loads and saves; threads here do them and
post the outcome back. Three kinds of threads: one that looks up (and goes on asking while blocks of another instance
are awaited), a few that load, a few that save. A pool that is absent is looked for in the background, and until it is
found every lookup says so at once.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

from mooncache import tracing
from mooncache.config.serving import ConnectorSection
from mooncache.errors import (
    ConfigInvalid,
    ConnectionLost,
    Internal,
    MasterUnavailable,
    MooncacheError,
    NodeUnavailable,
    NoNodes,
)
from mooncache.hf_engine.kv_memory import KvMemory
from mooncache.hf_engine.metrics import HfMetrics
from mooncache.kvcache.memory import InDoubt
from mooncache.logs import Event, get_logger

_RECONNECT_FIRST_S, _RECONNECT_MAX_S = 0.5, 10.0
_CLOSE_S = 5.0
_SICK_FIRST_S, _SICK_MAX_S = 0.5, 8.0
_SAVE_BATCH = 32
_SAVE_SHARE = 4  # saves may hold one block of so many, or a slow pool would take the engine's memory
_LOADS_MAX = 4096
_POLL_SHARE, _POLL_MAX_S = 4.0, 0.05
_GONE = (NoNodes, NodeUnavailable, ConnectionLost, MasterUnavailable, ConfigInvalid)

Connect = Callable[[], Any]
Post = Callable[[Callable[[], None]], None]

log = get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Found:
    """What a lookup learned: for each key whether the pool has it, seconds spent waiting for others, and how it went
    ("" when the pool answered, else timeout, failed, pool_absent or off)."""

    present: tuple[bool, ...] = ()
    waited_s: float = 0.0
    trouble: str = ""


@dataclass(frozen=True, slots=True)
class Loaded:
    """What a load did: leading blocks that are good, seconds, and bytes of the good blocks."""

    good: int
    elapsed_s: float
    size_bytes: int


@dataclass(slots=True)
class _Lookup:
    keys: Sequence[bytes]
    awaited: int
    wait_until_s: float
    done: Callable[[Found], None]
    started_s: float
    span: tracing.Span
    leading: int = 0
    cancelled: threading.Event = field(default_factory=threading.Event)


@dataclass(frozen=True, slots=True)
class _Save:
    key: bytes
    block: int
    done: Callable[[bool], None]
    trace: tracing.TraceContext | None


def _span(name: str, trace: tracing.TraceContext | None, blocks: int) -> tracing.Span:
    return tracing.span(name, kind="client", parent=trace, root=False, kvcache__blocks=blocks)


class PoolLink:
    """See the module's text.

    Args:
        section: limits and switches.
        connect: makes an SDK client; may raise MooncacheError.
        memory: where blocks live.
        post: runs a function on the engine's thread.
    """

    def __init__(
        self,
        section: ConnectorSection,
        connect: Connect,
        memory: KvMemory,
        post: Post,
        metrics: HfMetrics,
    ) -> None:
        self._section, self._connect, self._memory = section, connect, memory
        self._post, self._metrics = post, metrics
        self._client: Any = None
        self._closing = threading.Event()
        self._wake = threading.Condition()
        self._lookups: deque[_Lookup] = deque()
        self._saves: deque[_Save] = deque()
        self._saving = 0
        self._loaders = ThreadPoolExecutor(section.load_threads, "kv-load")
        self._loads = threading.Semaphore(_LOADS_MAX)
        self._threads: list[threading.Thread] = []
        self._sick_until_s = 0.0
        self._sick_pause_s = 0.0

    def start(self) -> None:
        """Begin to look for the pool."""
        if not self._section.enabled:
            return
        duties = [self._keep_connected, self._answer_lookups]
        duties += [self._save_blocks] * self._section.save_threads
        for duty in duties:
            thread = threading.Thread(target=duty, name=f"kv{duty.__name__}", daemon=True)
            thread.start()
            self._threads.append(thread)

    def current_client(self) -> Any:
        """The SDK's client; None until the pool was found."""
        return self._client

    @property
    def connected(self) -> bool:
        """True once the pool was found; the SDK itself copes with nodes that come and go."""
        return self._client is not None

    # --- for the engine's thread -----------------------------------------------------------------------------

    def look_up(
        self,
        keys: Sequence[bytes],
        awaited: int,
        wait_s: float,
        done: Callable[[Found], None],
        trace: tracing.TraceContext | None = None,
    ) -> Callable[[], None]:
        """Ask which keys are there, and until `wait_s` have passed wait for the first `awaited` of them.

        `done` is posted exactly once. Returns a function that ends the waiting early.
        """
        now_s = time.monotonic()
        span = _span("kvcache.lookup", trace, len(keys))
        lookup = _Lookup(keys, awaited, now_s + wait_s, done, now_s, span)
        trouble = "" if self._section.enabled else "off"
        if not trouble and not self._usable():
            trouble = "pool_absent"
        if trouble or not keys:
            self._finish(lookup, (), trouble)
        else:
            with self._wake:
                self._lookups.append(lookup)
                self._wake.notify_all()
        return lookup.cancelled.set

    def load(
        self,
        keys: Sequence[bytes],
        blocks: Sequence[int],
        done: Callable[[Loaded], None],
        trace: tracing.TraceContext | None = None,
    ) -> None:
        """Fetch blocks into the memory; `done` is posted exactly once, and nothing is written after it."""

        started_s = time.monotonic()

        def job() -> None:
            good = 0
            try:
                with _span("kvcache.load", trace, len(blocks)) as span:
                    good = self._fetch(keys, blocks, started_s + self._section.load_timeout_s)
                    span.set(kvcache__loaded_blocks=good, kvcache__bytes=good * self._memory.block_bytes)
            except InDoubt as doubt:
                self._trouble("load", doubt.error)
                doubt.wait(self._closing.wait)  # nothing may be written into blocks that were given away
            except Exception as error:  # noqa: BLE001  (whatever happened, the sequence goes on and computes)
                self._trouble("load", error)
            finally:
                self._memory.clear(blocks[good:])
                self._loads.release()
                elapsed_s = time.monotonic() - started_s
                outcome = Loaded(good, elapsed_s, good * self._memory.block_bytes)
                self._metrics.loaded(len(blocks) - good, outcome.size_bytes, elapsed_s)
                self._post(lambda: done(outcome))

        if self._closing.is_set() or not self._loads.acquire(blocking=False):
            self._post(lambda: done(Loaded(0, 0.0, 0)))
            return
        self._loaders.submit(job)

    def save(
        self,
        key: bytes,
        block: int,
        done: Callable[[bool], None],
        trace: tracing.TraceContext | None = None,
    ) -> bool:
        """Store a block that will not change until `done` is posted. False (and no `done`) when too much waits."""
        limit = min(
            self._section.save_queue_bytes_max // self._memory.block_bytes, self._memory.blocks // _SAVE_SHARE
        )
        with self._wake:
            if not self._usable():
                return False
            if len(self._saves) + self._saving >= limit:
                self._metrics.saves.labels("queue_full").inc()
                return False
            self._saves.append(_Save(key, block, done, trace))
            self._wake.notify_all()
        return True

    def quiet(self) -> bool:
        """True when nothing waits to be saved or is being saved."""
        with self._wake:
            return not self._saves and not self._saving

    def close(self) -> None:
        """End the threads; what waits is answered as absent."""
        self._closing.set()
        with self._wake:
            self._wake.notify_all()
        for thread in self._threads:
            thread.join(_CLOSE_S)
        self._loaders.shutdown(wait=True, cancel_futures=False)
        if self._client is not None:
            self._client.close()

    # --- threads ---------------------------------------------------------------------------------------------

    def _keep_connected(self) -> None:
        pause_s, told = _RECONNECT_FIRST_S, False
        while not self._closing.is_set():
            try:
                self._client = self._connect()
            except Exception as error:  # noqa: BLE001  (whatever is wrong with the pool, it may come right)
                if not told:
                    name = error.name if isinstance(error, MooncacheError) else "DEFECT"
                    log.warning(Event.CONNECTOR_POOL_ABSENT, code=name, reason=str(error))
                told = True
                self._closing.wait(pause_s)
                pause_s = min(pause_s * 2, _RECONNECT_MAX_S)
                continue
            log.info(Event.CONNECTOR_POOL_CONNECTED, nodes=len(self._client.nodes()))
            return

    def _answer_lookups(self) -> None:
        while not self._closing.is_set():
            with self._wake:
                if not self._lookups:
                    self._wake.wait(1.0)
                batch = list(self._lookups)
                self._lookups.clear()
            begun_s = time.monotonic()
            waiting = [lookup for lookup in batch if not self._ask(lookup)]
            if waiting:
                with self._wake:
                    self._lookups.extend(waiting)
                # Many that wait must not take a core from the model.
                asked_s = time.monotonic() - begun_s
                self._closing.wait(max(self._section.wait_poll_s, min(_POLL_MAX_S, _POLL_SHARE * asked_s)))
        for lookup in list(self._lookups):
            self._finish(lookup, (), "pool_absent")

    def _ask(self, lookup: _Lookup) -> bool:
        """One question. True when the lookup is over."""
        first = lookup.leading
        try:
            match = self._client.match(lookup.keys[first:], timeout_s=self._section.lookup_timeout_s)
        except Exception as error:  # noqa: BLE001  (a lookup has to end, or its request would hang)
            self._trouble("lookup", error)
            self._finish(lookup, (), "pool_absent" if isinstance(error, _GONE) else "failed")
            return True
        self._sick_pause_s = 0.0
        lookup.leading += match.leading_blocks
        present = (True,) * first + tuple(match.present)
        if match.unreachable_nodes and match.unreachable_nodes >= len(self._client.nodes()):
            self._finish(lookup, present, "pool_absent")
        elif lookup.leading >= lookup.awaited:
            self._finish(lookup, present, "")
        elif lookup.cancelled.is_set() or time.monotonic() >= lookup.wait_until_s:
            self._finish(lookup, present, "timeout")
        else:
            return False
        return True

    def _finish(self, lookup: _Lookup, present: tuple[bool, ...], trouble: str) -> None:
        found = Found(present, time.monotonic() - lookup.started_s, trouble)
        lookup.span.set(kvcache__found_blocks=sum(present), kvcache__reason=trouble)
        lookup.span.end()
        self._metrics.lookups.labels(trouble or "answered").inc()
        self._post(lambda: lookup.done(found))

    def _fetch(self, keys: Sequence[bytes], blocks: Sequence[int], until_s: float) -> int:
        """Leading blocks that arrived whole; the SDK has compared their checksums. Waiting behind other loads counts:
        with a pool that hangs, each would else wait for all before it."""
        timeout_s = until_s - time.monotonic()
        if timeout_s <= 0 or not self._usable():
            return 0
        result = self._memory.fill(
            blocks, lambda views: self._client.get_many_into(keys, views, timeout_s=timeout_s), until_s
        )
        for number, (code, size) in enumerate(zip(result.codes, result.sizes_bytes, strict=True)):
            if code != 0 or size != self._memory.block_bytes:
                return number
        return len(blocks)

    def _save_blocks(self) -> None:
        while True:
            with self._wake:
                while not self._saves and not self._closing.is_set():
                    self._wake.wait(1.0)
                if not self._saves:
                    return
                batch = [self._saves.popleft() for _ in range(min(_SAVE_BATCH, len(self._saves)))]
                self._saving += len(batch)
            codes = self._store(batch)
            with self._wake:
                self._saving -= len(batch)
            for save, code in zip(batch, codes, strict=True):
                self._metrics.saves.labels("stored" if code == 0 else "failed").inc()
                self._post(lambda save=save, code=code: save.done(code == 0))  # type: ignore[misc]

    def _store(self, batch: Sequence[_Save]) -> Sequence[int]:
        keys, blocks = [save.key for save in batch], [save.block for save in batch]
        timeout_s = 0.5 if self._closing.is_set() else self._section.save_timeout_s
        try:
            # Blocks of several requests may be saved together; the trace of the first has the span.
            with _span("kvcache.save", batch[0].trace, len(batch)) as span:
                result = self._memory.show(
                    blocks,
                    lambda views: self._client.put_many(keys, views, timeout_s=timeout_s),
                    time.monotonic() + timeout_s,
                )
                span.set(kvcache__bytes=result.codes.count(0) * self._memory.block_bytes)
        except Exception as error:  # noqa: BLE001  (the blocks have to be let go of)
            self._trouble("save", error)
            return [Internal.code] * len(batch)
        codes: Sequence[int] = result.codes
        return codes

    def _usable(self) -> bool:
        return (
            self._client is not None and not self._closing.is_set() and time.monotonic() >= self._sick_until_s
        )

    def _trouble(self, what: str, error: Exception) -> None:
        """Count and log a failure, and leave the pool alone for a while, longer each time in a row."""
        self._sick_pause_s = min(max(self._sick_pause_s * 2, _SICK_FIRST_S), _SICK_MAX_S)
        self._sick_until_s = time.monotonic() + self._sick_pause_s
        name = error.name if isinstance(error, MooncacheError) else "DEFECT"
        self._metrics.pool_errors.labels(what, name).inc()
        log.warning(Event.HF_POOL_FAILED, what=what, code=name, reason=str(error), pause_s=self._sick_pause_s)
