"""Waiting for blocks that others are about to write, on a real cluster."""

from __future__ import annotations

import asyncio
import re
import threading
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

import mooncache
from mooncache.client.keys import pack_keys, to_block_keys
from mooncache.cluster.embedded import EmbeddedCluster
from mooncache.errors import (
    OK,
    Closed,
    ConnectionLost,
    InvalidArgument,
    LimitExceeded,
    NodeUnavailable,
    UnknownNode,
)
from tests.client.conftest import make_cluster
from tests.conditions import WAIT_S, wait_until
from tests.processes import freeze

State = mooncache.WatchState


def packed(*names: str) -> bytes:
    return pack_keys(to_block_keys(names))


def counters(cluster: EmbeddedCluster, node: str) -> dict[str, float]:
    """What the node shows at /metrics, by name with labels."""
    with urllib.request.urlopen(f"http://{cluster.parts[node].metrics}/metrics", timeout=30) as answer:
        text = answer.read().decode()
    found = re.findall(r"^mooncache_store_node_(\S+) (\S+)$", text, re.MULTILINE)
    return {name: float(value) for name, value in found}


def ends(watch: mooncache.BlockWatch, count: int = 1) -> dict[str, mooncache.WatchNews]:
    """What each watch said at its end, with the positions of all its news."""
    found: dict[str, mooncache.WatchNews] = {}
    positions: dict[str, set[int]] = {}

    def all_ended() -> bool:
        for news in watch.next(0.2):
            assert news.name not in found, "news after the end"
            positions.setdefault(news.name, set()).update(news.positions)
            if news.state != State.MORE:
                everything = tuple(sorted(positions[news.name]))
                found[news.name] = mooncache.WatchNews(news.name, everything, news.state, news.code)
        return len(found) == count

    wait_until(all_ended, lambda: f"{count} ends, not only {found}", every_s=0.0)
    return found


def drive_until_open(
    watch: mooncache.BlockWatch, cluster: EmbeddedCluster, count: int, nodes: tuple[str, ...] = ("node-1",)
) -> None:
    """Drive the watch until each of the nodes has so many open waits."""

    def is_open() -> bool:
        assert watch.next(0.01) == []
        return all(counters(cluster, node)["waits_open"] == count for node in nodes)

    wait_until(is_open, f"{count} open waits")


@pytest.fixture
def watch(pool: mooncache.Client, cluster: EmbeddedCluster) -> Iterator[mooncache.BlockWatch]:
    with pool.watch() as made:
        yield made
    nodes = ("node-1", "node-2")
    wait_until(lambda: not any(counters(cluster, node)["waits_open"] for node in nodes), "no wait is left")


def test_a_commit_is_heard_of_and_one_call_is_enough(
    pool: mooncache.Client, watch: mooncache.BlockWatch, cluster: EmbeddedCluster
) -> None:
    before = counters(cluster, "node-1")
    watch.add("leg", packed("w1", "w2", "w3"), timeout_s=WAIT_S, node="node-1")
    drive_until_open(watch, cluster, 1)
    opened = counters(cluster, "node-1")
    calls = sum(opened[name] - before[name] for name in opened if name.startswith('requests_total{op="'))
    handshakes = sum(
        opened[name] - before[name] for name in ('requests_total{op="hello"}', 'requests_total{op="auth"}')
    )
    assert calls - handshakes == 1, "the WAIT; the connection stays for all that come later"
    assert opened["waited_keys"] == 3
    stored = pool.put_many(["w1", "w2", "w3"], [b"x" * 5000] * 3, prefer_node="node-1")
    assert stored.node_ids == ("node-1",) * 3
    assert ends(watch) == {"leg": mooncache.WatchNews("leg", (0, 1, 2), State.ALL)}
    after = counters(cluster, "node-1")
    assert after['requests_total{op="wait"}'] == before['requests_total{op="wait"}'] + 1
    assert after['requests_total{op="match"}'] == before['requests_total{op="match"}']
    assert after['waits_total{end="answered"}'] == before['waits_total{end="answered"}'] + 1


def test_news_of_blocks_as_they_come(pool: mooncache.Client, watch: mooncache.BlockWatch) -> None:
    names = ["n1", "n2", "n3"]
    watch.add("stream", packed(*names), timeout_s=WAIT_S, node="node-2", news_s=0.001)
    for position, name in enumerate(names):
        pool.put_many([name], [b"x" * 300_000], prefer_node="node-2")
        (news,) = watch.next(WAIT_S)
        assert news.positions == (position,)
        assert news.state == (State.ALL if name == "n3" else State.MORE)


def test_a_key_counts_wherever_it_is(pool: mooncache.Client, watch: mooncache.BlockWatch) -> None:
    pool.put_many(["u1"], [b"x" * 100], prefer_node="node-1")
    watch.add("anywhere", packed("u1", "u2"), timeout_s=WAIT_S)
    assert watch.next(0.05) == []
    pool.put_many(["u2"], [b"x" * 100], prefer_node="node-2")
    assert ends(watch)["anywhere"].state == State.ALL


def test_given_up_before_and_while_waiting(
    pool: mooncache.Client, watch: mooncache.BlockWatch, cluster: EmbeddedCluster
) -> None:
    pool.put_many(["g1"], [b"x" * 100], prefer_node="node-1")
    watch.add("early", packed("g1", "g2"), timeout_s=WAIT_S, node="node-1")
    watch.add("other", packed("g9"), timeout_s=WAIT_S, node="node-1")
    drive_until_open(watch, cluster, 2)
    assert pool.give_up(["g2", "g3"], node="node-1") == 1
    assert ends(watch) == {"early": mooncache.WatchNews("early", (0,), State.GIVEN_UP)}
    watch.add("late", packed("g3"), timeout_s=WAIT_S, node="node-1")
    pool.give_up(packed("g3"))
    assert ends(watch)["late"].state == State.GIVEN_UP
    pool.put_many(["g2"], [b"x" * 100], prefer_node="node-1")
    watch.add("again", packed("g2"), timeout_s=WAIT_S, node="node-1")
    assert ends(watch)["again"].state == State.ALL, "it was written after all"
    assert watch.remove("other")
    assert not watch.remove("other")


def test_time_is_over(pool: mooncache.Client, watch: mooncache.BlockWatch) -> None:
    pool.put_many(["t1"], [b"x" * 100], prefer_node="node-1")
    watch.add("short", packed("t1", "t2"), timeout_s=0.05, node="node-1")
    watch.add("look", packed("t1", "t2"), timeout_s=0.001, node="node-1")
    found = ends(watch, 2)
    assert found["short"] == mooncache.WatchNews("short", (0,), State.TIMEOUT)
    assert found["look"].state == State.TIMEOUT


def test_two_hundred_watches_of_other_tenants_and_threads(
    watch: mooncache.BlockWatch, cluster: EmbeddedCluster, pool: mooncache.Client
) -> None:
    names = [f"m{i}" for i in range(220)]
    for i in range(200):
        watch.add(f"leg-{i}", packed(*names[i : i + 20]), timeout_s=WAIT_S, node="node-1")
    drive_until_open(watch, cluster, 200)
    with mooncache.connect(**cluster.client_settings(), tenant="stranger") as stranger:
        stranger.put_many(names, [b"s"] * len(names), prefer_node="node-1")
        assert stranger.give_up(names) == 0
    assert watch.next(0.05) == [], "tenants do not hear of each other"
    writer = threading.Thread(target=lambda: pool.put_many(names, [b"x"] * len(names), prefer_node="node-1"))
    writer.start()
    found = ends(watch, 200)
    writer.join()
    assert {news.state for news in found.values()} == {State.ALL}
    assert {news.positions for news in found.values()} == {tuple(range(20))}


def test_what_makes_no_sense(pool: mooncache.Client, watch: mooncache.BlockWatch) -> None:
    with pytest.raises(InvalidArgument, match="32 bytes per key"):
        watch.add("a", b"short", timeout_s=1)
    with pytest.raises(InvalidArgument, match="needs a key"):
        watch.add("a", b"", timeout_s=1)
    with pytest.raises(InvalidArgument, match="ten minutes"):
        watch.add("a", packed("k"), timeout_s=601)
    with pytest.raises(InvalidArgument, match="above 0"):
        watch.add("a", packed("k"), timeout_s=0)
    with pytest.raises(InvalidArgument, match=r"(?i)news_s"):
        watch.add("a", packed("k"), timeout_s=1, news_s=-1.0)
    with pytest.raises(LimitExceeded, match="65536 keys"):
        watch.add("a", bytes(32) * 65_537, timeout_s=1)
    with pytest.raises(UnknownNode, match="node-7"):
        watch.add("a", packed("k"), timeout_s=1, node="node-7")
    with pytest.raises(UnknownNode, match="node-7"):
        pool.give_up(packed("k"), node="node-7")
    watch.add("a", packed("k"), timeout_s=60, node="node-1")
    with pytest.raises(InvalidArgument, match="is open"):
        watch.add("a", packed("k"), timeout_s=1)
    outcome = pool.put_many(["somewhere"], [b"x"], prefer_node="node-7")
    assert outcome.codes == (OK,), "a node that is not in the map is no preference"


def test_wake_and_close(pool: mooncache.Client) -> None:
    watch = pool.watch()
    watch.wake()
    assert watch.next(WAIT_S) == []
    assert watch.next(0) == []
    ended: list[type[BaseException]] = []

    def wait() -> None:
        with pytest.raises(Closed) as raised:
            watch.next(WAIT_S)
        ended.append(raised.type)

    waiter = threading.Thread(target=wait)
    waiter.start()
    watch.close()
    waiter.join(WAIT_S)
    assert ended == [Closed]
    with pytest.raises(Closed):
        watch.add("a", packed("k"), timeout_s=1)
    watch.close()


async def _async_life(settings: dict[str, object]) -> None:
    async with await mooncache.connect_async(**settings) as pool, pool.watch() as watch:  # type: ignore[arg-type]
        watch.add("a", packed("async1"), timeout_s=WAIT_S, node="node-1")
        waiting = asyncio.create_task(watch.next(WAIT_S))
        await asyncio.sleep(0)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        await pool.put_many(["async1"], [b"x"], prefer_node="node-1")
        news = await watch.next(WAIT_S) or await watch.next(WAIT_S)
        assert news == [mooncache.WatchNews("a", (0,), State.ALL)]
        watch.add("b", packed("async2"), timeout_s=WAIT_S, node="node-1")
        assert await pool.give_up(packed("async2")) in (0, 1)
        assert [item.state for item in await watch.next(WAIT_S)] == [State.GIVEN_UP]
    with pytest.raises(Closed):
        await watch.next(1.0)


def test_the_asyncio_twin(cluster: EmbeddedCluster) -> None:
    asyncio.run(_async_life(cluster.client_settings()))


@pytest.fixture
def fragile(tmp_path: Path) -> Iterator[EmbeddedCluster]:
    """A cluster that a test may break."""
    cluster = make_cluster(tmp_path, nodes=2)
    cluster.start()
    yield cluster
    cluster.stop()


@pytest.mark.slow
def test_a_killed_node_ends_its_watches_and_takes_no_more_blocks(fragile: EmbeddedCluster) -> None:
    with mooncache.connect(**fragile.client_settings()) as pool, pool.watch() as watch:
        watch.add("there", packed("d1"), timeout_s=WAIT_S, node="node-1")
        watch.add("anywhere", packed("d1"), timeout_s=WAIT_S)
        watch.add("elsewhere", packed("d2"), timeout_s=WAIT_S, node="node-2")
        drive_until_open(watch, fragile, 2, ("node-1", "node-2"))
        fragile.kill("node-1")
        found = ends(watch, 2)
        assert found["there"].state == found["anywhere"].state == State.UNREACHABLE
        assert found["there"].code in {ConnectionLost.code, NodeUnavailable.code}
        stored = pool.put_many(["d2"], [b"x" * 1000], prefer_node="node-1")
        assert (stored.codes, stored.node_ids) == ((OK,), ("node-2",))
        assert ends(watch)["elsewhere"].state == State.ALL


@pytest.mark.slow
def test_a_stopped_node_is_found_out(fragile: EmbeddedCluster) -> None:
    with mooncache.connect(**fragile.client_settings()) as pool, pool.watch() as watch:
        watch.add("stopped", packed("s1"), timeout_s=WAIT_S * 5, node="node-1")
        drive_until_open(watch, fragile, 1)
        pid = fragile.parts["node-1"].pid
        assert pid is not None
        freeze(pid)
        found = ends(watch)
        assert found["stopped"].state == State.UNREACHABLE
