"""Where blocks are in a cluster too large to ask every node: how often the master is asked, and what without it."""

from __future__ import annotations

import struct
import time
from collections.abc import Callable
from typing import Any

import pytest

from mooncache.client.engine import ClientCore
from mooncache.client.keys import pack_keys, to_block_key, to_block_keys
from mooncache.client.locator import ABSENT_MAX_S, AWAY_S, Locator
from mooncache.client.watch import BlockWatch
from mooncache.errors import MasterUnavailable
from tests.client.test_native_nodes import make_engine, servers

NODES = 9  # one more than are asked directly
NOWHERE = struct.pack("<H", 0)


class Directory:
    """A master's Locate: `holders` by key; counts the calls."""

    def __init__(self) -> None:
        self.holders: dict[bytes, int] = {}
        self.calls = 0
        self.away = False

    def __call__(self, packed: bytes, timeout_s: float) -> bytes:
        self.calls += 1
        if self.away:
            raise MasterUnavailable("gone")
        found = []
        for at in range(0, len(packed), 32):
            holder = self.holders.get(packed[at : at + 32])
            found.append(NOWHERE if holder is None else struct.pack("<HHBBQ", 1, holder, 1, 0, 4))
        return b"".join(found)


def far_key(reader: ClientCore, writer: ClientCore, node: int) -> str:
    """Puts a block onto a node that the reader would not guess by itself."""
    for number in range(100):
        key = f"block-{number}"
        assert writer.put_many([key], [b"data"], 1, None, node=node).codes == (0,)
        if not any(reader._native.exists(pack_keys([to_block_key(key)]), 5.0)):
            return key
    raise AssertionError("every key is guessed")


def test_a_block_that_is_nowhere_is_not_asked_of_the_master_at_every_poll() -> None:
    directory = Directory()
    with servers(NODES) as running:
        engine = make_engine(running, directory)
        now = [1000.0]
        locator = Locator(engine._native, directory, lambda: now[0])
        key = to_block_key("awaited")
        for _ in range(20):
            assert not locator.learn([key], 1.0)
            now[0] += 0.01
        assert directory.calls == 2, "20 polls in 0.2 s, and nodes report every 0.1 s"
        for _ in range(1000):
            assert not locator.learn([key], 1.0)
            now[0] += 0.01
        assert directory.calls < 45, "the longer it takes, the rarer"
        directory.holders[key] = 8
        now[0] += ABSENT_MAX_S + 0.01
        assert locator.learn([key], 1.0), "and it is found"
        directory.calls = 0
        assert not locator.learn([key], 1.0)
        assert directory.calls == 0, "the core knows its place now"
        engine.close()


def test_polls_of_a_reader_reach_the_master_seldom() -> None:
    directory = Directory()
    with servers(NODES) as running:
        engine = make_engine(running, directory)
        started_s = time.monotonic()
        for _ in range(20):
            assert engine.exists_many(["awaited"], None) == (False,)
        taken_s = time.monotonic() - started_s
        assert directory.calls <= 1 + taken_s / 0.1
        engine.close()


def test_without_a_master_the_nodes_themselves_are_asked() -> None:
    directory = Directory()
    directory.away = True
    with servers(NODES) as running:
        writer, reader = make_engine(running, directory), make_engine(running, directory)
        key = far_key(reader, writer, 8)
        assert reader.get_many([key], None).values == (b"data",)
        assert directory.calls == 1
        fresh = make_engine(running, directory)
        chain = pack_keys(to_block_keys([key]))
        assert fresh.match(chain, True, None).leading_blocks == 1
        assert reader.exists_many([key, "nowhere"], None) == (True, False)
        assert directory.calls == 2, "a master that is away is not asked at each call"
        for engine in (writer, reader, fresh):
            engine.close()


def test_a_master_that_comes_back_is_asked_again() -> None:
    directory = Directory()
    directory.away = True
    with servers(NODES) as running:
        engine = make_engine(running, directory)
        now = [0.0]
        locator = Locator(engine._native, directory, lambda: now[0])
        assert not locator.learn([to_block_key("a")], 1.0)
        directory.away = False
        assert not locator.learn([to_block_key("b")], 1.0)
        assert directory.calls == 1
        now[0] = AWAY_S + 0.1
        assert not locator.learn([to_block_key("c")], 1.0)
        assert directory.calls == 2
        engine.close()


class SlowCore:
    """A native core whose nodes take as long as they may, and then have nothing."""

    def __init__(self) -> None:
        self.started_s = time.monotonic()
        self.ends_s: list[float] = []
        self.located = False

    def _slow(self, limit_s: float) -> None:
        self.ends_s.append(time.monotonic() - self.started_s + limit_s)
        time.sleep(min(limit_s, 0.2))

    def set_map(self, version: int, nodes: list[Any]) -> None: ...
    def close(self) -> None: ...
    def learn_locations(self, keys: bytes, packed: bytes) -> None:
        self.located = True

    def unlocated(self, keys: bytes) -> list[int]:
        return [] if self.located else list(range(len(keys) // 32))

    def locate(self, keys: bytes, limit_s: float) -> bytes:
        self._slow(limit_s)
        return bytes(len(keys))

    def get(self, keys: list[bytes], targets: Any, limit_s: float, *_: Any) -> list[tuple[int, int, None]]:
        self._slow(limit_s)
        return [(200, 0, None)] * len(keys)

    def get_bytes(self, keys: list[bytes], limit_s: float, cancel: Any) -> list[int]:
        self._slow(limit_s)
        return [200] * len(keys)

    def exists(self, keys: bytes, limit_s: float, cancel: Any) -> bytes:
        self._slow(limit_s)
        return bytes(1)

    def match(self, keys: bytes, limit_s: float, *_: Any) -> tuple[int, bytes, int, list[Any], list[int]]:
        self._slow(limit_s)
        return 0, bytes(1), 0, [[]], [0]

    def stat(self, keys: bytes, limit_s: float, cancel: Any) -> list[None]:
        self._slow(limit_s)
        return [None] * (len(keys) // 32)

    def remove(self, keys: bytes, limit_s: float) -> list[int]:
        self._slow(limit_s)
        return [200] * (len(keys) // 32)


CALLS: dict[str, Callable[[ClientCore, float], Any]] = {
    "get_many_into": lambda engine, limit_s: engine.get_many_into(["a"], [bytearray(4)], limit_s),
    "get_many": lambda engine, limit_s: engine.get_many(["a"], limit_s),
    "exists_many": lambda engine, limit_s: engine.exists_many(["a"], limit_s),
    "match": lambda engine, limit_s: engine.match(["a"], True, limit_s),
    "stat_many": lambda engine, limit_s: engine.stat_many(["a"], limit_s),
    "remove_many": lambda engine, limit_s: engine.remove_many(["a"], limit_s),
}


@pytest.mark.parametrize("name", CALLS)
def test_one_deadline_for_the_nodes_the_master_and_the_nodes_again(name: str) -> None:
    core = SlowCore()
    engine = ClientCore(core, default_timeout_s=10.0, locate=core.locate)
    limit_s = 2.0
    core.started_s = time.monotonic()
    CALLS[name](engine, limit_s)
    assert len(core.ends_s) == 3, "asked, located, asked again"
    # each part is told to end within the caller's limit; a new limit for each would end 0.2 s and 0.4 s later
    assert max(core.ends_s) < limit_s + 0.3


def test_what_was_not_found_is_found_once_a_watch_reports_its_commit() -> None:
    """The directory does not know of the block, and was asked a moment ago: the watch's news is what counts."""
    with servers(NODES) as running:
        directory = Directory()
        writer, scout, reader = (make_engine(running, directory) for _ in range(3))
        key = far_key(scout, writer, 8)
        assert writer.remove_many([key], None).codes == (0,)
        assert reader.get_many([key], None).values == (None,)
        watch = reader.watch(BlockWatch)
        watch.add("block", pack_keys([to_block_key(key)]), timeout_s=20.0, node="n8")
        assert writer.put_many([key], [b"data"], 1, None, node=8).codes == (0,)
        assert [news.positions for news in watch.next(20.0)] == [(0,)]
        assert reader.get_many([key], None).values == (b"data",)
        watch.close()
        for engine in (writer, scout, reader):
            engine.close()


def test_many_nodes_and_no_master_at_all() -> None:
    with servers(NODES) as running:
        writer, reader = make_engine(running, None), make_engine(running, None)
        key = far_key(reader, writer, 8)
        assert reader.get_many([key], None).values == (b"data",)
        writer.close()
        reader.close()
