"""One watch for all waits: each ends exactly once, whatever becomes of the pool, and no defect ends the others."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from mooncache.client.results import WatchState
from mooncache.errors import Closed, LimitExceeded, NodeUnavailable, UnknownNode
from mooncache.kvcache import watcher as wt
from mooncache.kvcache.pool_link import Breaker, PoolLink
from tests.conditions import wait_until
from tests.kvcache.conftest import WAIT_S
from tests.kvcache.faulty import FaultyPool, FaultyWatch
from tests.kvcache.test_lookup import chain, key


class Heard:
    """What one wait heard."""

    def __init__(self) -> None:
        self.news: list[tuple[tuple[int, ...], WatchState]] = []
        self.ended = threading.Event()

    def __call__(self, positions: Sequence[int], state: WatchState) -> None:
        assert not self.ended.is_set(), "news after the end"
        self.news.append((tuple(positions), state))
        if state is not WatchState.MORE:
            self.ended.set()

    def end(self) -> WatchState:
        assert self.ended.wait(WAIT_S)
        return self.news[-1][1]


@pytest.fixture
def watcher(faulty_link: PoolLink) -> Iterator[wt.Watcher]:
    made = wt.Watcher(faulty_link)
    yield made
    made.close()


def test_news_come_as_blocks_do_and_waits_are_apart(faulty: FaultyPool, watcher: wt.Watcher) -> None:
    first, second = Heard(), Heard()
    watcher.add(chain(2), first, timeout_s=WAIT_S, node="n1", news_s=0.001)
    watcher.add(key(2), second, timeout_s=WAIT_S)
    wait_until(lambda: len(faulty.watched) == 2, "both wait")
    faulty.blocks = {key(1): b""}
    wait_until(lambda: first.news, "news")
    faulty.blocks |= {key(0): b""}
    assert first.end() is WatchState.ALL
    assert first.news == [((1,), WatchState.MORE), ((0,), WatchState.ALL)]
    assert second.news == [] and watcher.waiting == 1
    assert faulty.watched == [("n1", 2), (None, 1)]


def test_a_removed_wait_hears_nothing_and_its_node_hears_of_it(
    faulty: FaultyPool, watcher: wt.Watcher, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[str] = []
    for name in ("remove", "next"):
        plain = getattr(FaultyWatch, name)
        monkeypatch.setattr(
            FaultyWatch, name, lambda self, at, n=name, plain=plain: (calls.append(n), plain(self, at))[1]
        )
    heard = Heard()
    number = watcher.add(chain(1), heard, timeout_s=WAIT_S)
    wait_until(lambda: faulty.watched, "it waits")
    watcher.remove(number)
    watcher.remove(number)
    wait_until(lambda: "remove" in calls and calls[-1] == "next", "a watch sends in `next` only")
    faulty.blocks = {key(0): b""}
    other = Heard()
    watcher.add(key(0), other, timeout_s=WAIT_S)
    assert other.end() is WatchState.ALL
    assert heard.news == [] and calls.count("remove") == 1


def test_a_node_that_says_nothing_ends_the_wait_after_its_time(
    faulty: FaultyPool, watcher: wt.Watcher, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(wt, "SILENCE_S", 0.01)
    monkeypatch.setattr(FaultyWatch, "_news", lambda self, wait: None)
    heard = Heard()
    watcher.add(chain(1), heard, timeout_s=0.01)
    assert heard.end() is WatchState.TIMEOUT


@pytest.mark.parametrize("error", [LimitExceeded("too many nodes"), UnknownNode("no such node")])
def test_a_wait_that_the_client_refuses_is_no_failure_of_the_pool(
    faulty: FaultyPool, error: Exception
) -> None:
    link = PoolLink(lambda: faulty, breaker=Breaker(failures_max=1))
    assert link.connected.wait(WAIT_S)
    watcher, heard = wt.Watcher(link), Heard()
    faulty.error = error
    watcher.add(chain(1), heard, timeout_s=WAIT_S)
    assert heard.end() is WatchState.UNREACHABLE
    assert link.usable
    faulty.error, heard = NodeUnavailable("gone"), Heard()
    watcher.add(chain(1), heard, timeout_s=WAIT_S)
    assert heard.end() is WatchState.UNREACHABLE
    assert not link.usable
    watcher.close()
    link.close()


def test_without_a_pool_a_wait_ends_at_once() -> None:
    def refuse() -> Any:
        raise NodeUnavailable("none there")

    link = PoolLink(refuse, pause_first_s=60)
    watcher, heard = wt.Watcher(link), Heard()
    watcher.add(chain(1), heard, timeout_s=WAIT_S)
    assert heard.end() is WatchState.UNREACHABLE
    watcher.close()
    link.close()


@pytest.mark.parametrize("error", [ZeroDivisionError(), Closed("closed")])
def test_a_watch_that_breaks_ends_its_waits_and_the_next_ones_get_another(
    faulty: FaultyPool, watcher: wt.Watcher, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    heard = Heard()
    watcher.add(chain(1), heard, timeout_s=WAIT_S)
    wait_until(lambda: faulty.watched, "it waits")
    with monkeypatch.context() as broken:

        def fail(self: FaultyWatch, wait: Any) -> Any:
            raise error

        broken.setattr(FaultyWatch, "_news", fail)
        assert heard.end() is WatchState.UNREACHABLE
    faulty.blocks, again = {key(0): b""}, Heard()
    watcher.add(chain(1), again, timeout_s=WAIT_S)
    assert again.end() is WatchState.ALL


def test_a_function_that_fails_ends_neither_the_thread_nor_other_waits(
    faulty: FaultyPool, watcher: wt.Watcher
) -> None:
    faulty.blocks = {key(0): b""}
    watcher.add(chain(1), lambda *_: 1 // 0, timeout_s=WAIT_S)
    watcher.later(0.0, lambda: 1 // 0)
    heard, later = Heard(), threading.Event()
    watcher.add(chain(1), heard, timeout_s=WAIT_S)
    watcher.later(0.001, later.set)
    assert heard.end() is WatchState.ALL and later.wait(WAIT_S)


def test_closing_ends_the_thread_and_says_nothing(faulty: FaultyPool, faulty_link: PoolLink) -> None:
    watcher, heard = wt.Watcher(faulty_link), Heard()
    watcher.close()  # before its thread began
    watcher = wt.Watcher(faulty_link)
    watcher.add(chain(1), heard, timeout_s=WAIT_S)
    watcher.later(WAIT_S, lambda: None)
    wait_until(lambda: faulty.watched, "it waits")
    thread = watcher._own._thread
    assert thread is not None
    watcher.close()
    assert not thread.is_alive() and heard.news == []
