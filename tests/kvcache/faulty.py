"""A pool that breaks on demand."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass, field
from typing import Any

from mooncache.client.keys import split_keys
from mooncache.client.results import (
    AccusedWriter,
    BlockCopy,
    Deviation,
    GetResult,
    MatchResult,
    PutResult,
    WatchNews,
    WatchState,
    WrongBlocks,
)
from mooncache.errors import Closed, DeadlineExceeded, NotFound, error_for

WAIT_S = 60.0


class FaultyPool:
    """Holds blocks in a dictionary. Calls wait at `gate`, raise `error`, answer `codes`. After `stalls_after` blocks
    nothing comes any more: a get takes all the time that it has."""

    def __init__(self) -> None:
        self.blocks: dict[bytes, bytes] = {}
        self.calls: list[str] = []
        self.given: set[bytes] = set()  # keys of blocks that a get has brought
        self.error: Exception | None = None
        self.gate: threading.Event | None = None
        self.entered = threading.Event()
        self.codes: dict[bytes, int] = {}
        self.sizes: dict[bytes, int] = {}
        self.unreachable_nodes = 0
        self.stalls_after: int | None = None
        self.closed = False
        self.places: dict[bytes, tuple[str, str]] = {}  # node and tier of blocks
        self.elsewhere: set[bytes] = set()  # keys of blocks that a wait at a node does not see
        self.given_up: set[bytes] = set()
        self.unwatchable: set[str | None] = set()  # nodes whose waits end as unreachable
        self.watched: list[tuple[str | None, int]] = []  # node and keys of every wait
        self.wrong: list[tuple[list[bytes], Deviation]] = []
        self.preferred: list[str | None] = []  # the node of every put

    def _enter(self, call: str) -> None:
        self.calls.append(call)
        self.entered.set()
        if self.gate is not None:
            assert self.gate.wait(WAIT_S), "the test never opened the gate"
        if self.error is not None:
            raise self.error

    def put_many(
        self, keys: Any, values: Any, *, prefer_node: str | None = None, timeout_s: float | None = None
    ) -> PutResult:
        self._enter("put")
        self.preferred.append(prefer_node)
        codes = []
        for key, slices in zip(keys, values, strict=True):
            codes.append(self.codes.get(key, 0))
            if codes[-1] == 0:
                self.blocks[key] = b"".join(bytes(piece) for piece in slices)
                self.given_up.discard(key)
        nodes = ("" if key in self.elsewhere else prefer_node or "n" for key in keys)
        return PutResult(tuple(codes), tuple(code == 0 for code in codes), tuple(nodes))

    def report_wrong(
        self, keys: Any, found: Deviation, *, tenant: str = "", timeout_s: float | None = None
    ) -> WrongBlocks:
        self._enter("report_wrong")
        self.wrong.append((list(keys), found))
        for key in keys:
            self.blocks.pop(key, None)
        return WrongBlocks((0,) * len(self.wrong[-1][0]), (AccusedWriter(7, "bad", "b", quarantined=True),))

    def get_many_into(self, keys: Any, destinations: Any, *, timeout_s: float | None = None) -> GetResult:
        self._enter("get")
        codes, sizes = [], []
        for key, slices in zip(keys, destinations, strict=True):
            if self.stalls_after is not None:
                if not self.stalls_after:
                    return self._late(codes, sizes, len(keys), timeout_s)
                self.stalls_after -= 1
            data = self.blocks.get(key)
            code = self.codes.get(key, NotFound.code if data is None else 0)
            codes.append(code)
            sizes.append(self.sizes.get(key, len(data or b"")) if code == 0 else 0)
            if data is not None and code == 0:
                at = 0
                for piece in slices:
                    piece[:] = data[at : at + len(piece)]
                    at += len(piece)
                self.given.add(key)
        return GetResult(tuple(codes), tuple(sizes), ("n",) * len(codes))

    def _late(self, codes: list[int], sizes: list[int], count: int, timeout_s: float | None) -> GetResult:
        """Nothing more until the time is over."""
        assert timeout_s is not None
        threading.Event().wait(timeout_s)
        late = count - len(codes)
        return GetResult((*codes, *[DeadlineExceeded.code] * late), (*sizes, *[0] * late), ("n",) * count)

    def exists_many(self, keys: Any, *, timeout_s: float | None = None) -> tuple[bool, ...]:
        self._enter("exists")
        return tuple(key in self.blocks for key in keys)

    def match(self, keys: Any, *, touch: bool = True, timeout_s: float | None = None) -> MatchResult:
        self._enter("match")
        asked = split_keys(keys) if isinstance(keys, bytes) else list(keys)
        present = tuple(key in self.blocks for key in asked)
        run = next((i for i, there in enumerate(present) if not there), len(present))
        copies = tuple((BlockCopy(*self.places[key]),) if key in self.places else () for key in asked)
        return MatchResult(run, present, self.unreachable_nodes, copies)

    def reserve_many(
        self, keys: Any, block_bytes: int, *, prefer_node: str | None = None, timeout_s: float | None = None
    ) -> Any:
        self._enter("reserve")
        raise error_for(300, "full")

    def watch(self) -> FaultyWatch:
        return FaultyWatch(self)

    def give_up(self, keys: Any, *, node: str | None = None, timeout_s: float) -> int:
        self._enter("give_up")
        self.given_up.update(key for key in keys if key not in self.blocks)
        return 0

    def nodes(self) -> tuple[str, ...]:
        return ("n1", "n2")

    def stats(self) -> dict[str, int]:
        return {}

    def close(self) -> None:
        self.closed = True


@dataclass
class _Wait:
    name: str
    node: str | None
    keys: list[bytes]
    until_s: float
    news: bool
    said: set[int] = field(default_factory=set)


class FaultyWatch:
    """Waits for blocks of a faulty pool, whose tests put them there without a word: it looks every millisecond."""

    def __init__(self, pool: FaultyPool) -> None:
        self.pool = pool
        self.waits: dict[str, _Wait] = {}
        self.changed = threading.Condition()
        self.awake = False
        self.closed = False

    def add(
        self, name: str, keys: bytes, *, timeout_s: float, node: str | None = None, news_s: float = 0.0
    ) -> None:
        self.pool.watched.append((node, len(keys) // 32))
        self.pool._enter("watch")
        with self.changed:
            until_s = time.monotonic() + timeout_s
            self.waits[name] = _Wait(name, node, split_keys(keys), until_s, news_s > 0)

    def remove(self, name: str) -> None:
        with self.changed:
            self.waits.pop(name, None)

    def wake(self) -> None:
        with self.changed:
            self.awake = True
            self.changed.notify()

    def next(self, timeout_s: float) -> list[WatchNews]:
        until_s = time.monotonic() + timeout_s
        with self.changed:
            while True:
                if self.closed or self.pool.closed:
                    raise Closed("the client was closed")
                news = [found for wait in list(self.waits.values()) if (found := self._news(wait))]
                if news or self.awake or time.monotonic() >= until_s:
                    self.awake = False
                    return news
                self.changed.wait(0.001)

    def _news(self, wait: _Wait) -> WatchNews | None:
        pool = self.pool
        hidden = pool.elsewhere if wait.node else set()
        there = {at for at, key in enumerate(wait.keys) if key in pool.blocks and key not in hidden}
        fresh = tuple(sorted(there - wait.said))
        missing = [key for at, key in enumerate(wait.keys) if at not in there]
        state = WatchState.MORE
        if not missing:
            state = WatchState.ALL
        elif wait.node in pool.unwatchable:
            state = WatchState.UNREACHABLE
        elif any(key in pool.given_up for key in missing):
            state = WatchState.GIVEN_UP
        elif time.monotonic() >= wait.until_s:
            state = WatchState.TIMEOUT
        if state is WatchState.MORE:
            if not (fresh and wait.news):
                return None
            wait.said |= there
        else:
            del self.waits[wait.name]
        return WatchNews(wait.name, fresh, state)

    def close(self) -> None:
        with self.changed:
            self.closed = True
            self.waits.clear()
            self.changed.notify()
