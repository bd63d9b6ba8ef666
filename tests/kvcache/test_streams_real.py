"""Streamed loads and waits on a real cluster of two nodes: told by the node that has the blocks, wherever they go."""

from __future__ import annotations

import os
import re
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import mooncache
from mooncache.cluster.embedded import ClusterSettings, EmbeddedCluster
from mooncache.kvcache import mover as mv
from mooncache.kvcache.lookup import LookupOutcome, LookupRequest, Lookups
from mooncache.kvcache.pool_link import PoolLink
from tests.conditions import wait_until
from tests.kvcache.conftest import BLOCK_BYTES, WAIT_S, Engine
from tests.kvcache.test_mover import make, wait_for

COUNT = 8


def open_waits(cluster: EmbeddedCluster, node: str) -> int:
    with urllib.request.urlopen(f"http://{cluster.parts[node].metrics}/metrics", timeout=30) as answer:
        found = re.search(r"^mooncache_store_node_waits_open (\S+)$", answer.read().decode(), re.MULTILINE)
    assert found is not None
    return int(float(found[1]))


class Pair:
    """A cluster of two nodes, a writer and a reader."""

    def __init__(self, folder: Path) -> None:
        settings = ClusterSettings(state_dir=folder, nodes=2, capacity_bytes=64 << 20, port=0)
        self.cluster = EmbeddedCluster(settings)
        self.cluster.start()
        self.client = mooncache.connect(**self.cluster.client_settings())
        self.links = [PoolLink(lambda: mooncache.connect(**self.cluster.client_settings())) for _ in range(2)]
        for link in self.links:
            assert link.connected.wait(WAIT_S)
        self.engines = [Engine(), Engine(200)]
        self.writer, self.reader = (
            make(link, engine, load_timeout_s=WAIT_S, save_timeout_s=WAIT_S)
            for link, engine in zip(self.links, self.engines, strict=True)
        )
        for block in range(COUNT):
            self.engines[0].fill(block, 10 * block)
        self.nodes = [node.node_id for node in self.client.nodes()]

    def stream(self, keys: list[bytes], **more: Any) -> None:
        awaited = tuple(range(len(keys)))
        given = {"awaited": awaited, "await_s": WAIT_S, **more}
        self.reader.load(mv.TransferJob("l", tuple(keys), tuple(range(len(keys))), **given))

    def save(self, keys: list[bytes], first: int = 0, end: int = COUNT, **more: Any) -> mv.SaveReport:
        places = tuple(range(first, end))
        self.writer.save(mv.TransferJob("s", tuple(keys[first:end]), places, is_awaited=True, **more))
        report: mv.SaveReport = wait_for(self.writer, self.writer.take_saves)
        return report

    def waits(self) -> int:
        """Open at all nodes, by their metrics."""
        return sum(open_waits(self.cluster, node) for node in self.nodes)

    def arrived(self) -> bool:
        return all(self.engines[1].block(at) == self.engines[0].block(at) for at in range(COUNT))

    def close(self) -> None:
        for mover in (self.writer, self.reader):
            mover.close()
        for link in self.links:
            link.close()
        self.client.close()
        self.cluster.stop()


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    made = Pair(tmp_path_factory.mktemp("pair"))
    yield made
    made.close()


def new_keys(count: int = COUNT) -> list[bytes]:
    return [os.urandom(32) for _ in range(count)]


@pytest.mark.parametrize("which", [0, 1, None])
def test_blocks_come_through_the_node_that_is_named(pair: Pair, which: int | None) -> None:
    keys = new_keys()
    node = "" if which is None else pair.nodes[which]
    pair.stream(keys, node=node)
    wait_until(lambda: pair.waits() == (2 if which is None else 1), "it waits at the node, or at both")
    pair.save(keys, 0, 3, node=node)
    wait_until(lambda: pair.engines[1].block(2) == pair.engines[0].block(2), "the first ones are loaded")
    assert pair.reader.loading == 1
    pair.save(keys, 3, node=node)
    report = wait_for(pair.reader, pair.reader.take_loads)
    assert (report.loaded, report.reason) == (COUNT, "") and pair.arrived()
    assert 0 < report.hidden_s <= report.waited_s
    if which is not None:
        places = [bytearray(BLOCK_BYTES) for _ in keys]
        assert pair.client.get_many_into(keys, places).node_ids == (node,) * COUNT
    wait_until(lambda: pair.waits() == 0, "no wait is left")


def test_blocks_that_went_to_another_node_are_found(pair: Pair) -> None:
    keys = new_keys()
    pair.stream(keys, node=pair.nodes[1])
    wait_until(lambda: pair.waits() == 1, "it waits")
    assert pair.client.put_many(keys[:2], [b"x"] * 2, prefer_node=pair.nodes[0]).codes == (0, 0)
    # The writer finds that the pool has them, and says so at the node where they are awaited.
    report = pair.save(keys, node=pair.nodes[1])
    assert report.present == 2
    loaded = wait_for(pair.reader, pair.reader.take_loads)
    assert (loaded.loaded, loaded.reason) == (0, mv.MoveFailure.WRONG_SIZE), "it was found, and is no block"


def test_what_is_given_up_ends_the_wait(pair: Pair) -> None:
    keys = new_keys()
    pair.stream(keys, node=pair.nodes[0])
    wait_until(lambda: pair.waits() == 1, "it waits")
    pair.save(keys, 0, 5, node=pair.nodes[0])
    pair.client.give_up(keys[5:], node=pair.nodes[0])
    report = wait_for(pair.reader, pair.reader.take_loads)
    assert (report.loaded, report.reason) == (5, mv.MoveFailure.NOT_COME)
    assert report.waited_s < WAIT_S / 2
    pair.stream(keys[5:], node=pair.nodes[0])  # and of one that comes late
    report = wait_for(pair.reader, pair.reader.take_loads)
    assert (report.loaded, report.reason) == (0, mv.MoveFailure.NOT_COME)


def test_a_node_that_is_in_no_map_is_not_waited_for(pair: Pair) -> None:
    keys = new_keys()
    pair.stream(keys, node="node-of-another-cluster")
    wait_until(lambda: pair.waits() == 2, "it waits at all nodes instead")
    pair.save(keys, node="node-of-another-cluster")
    report = wait_for(pair.reader, pair.reader.take_loads)
    assert (report.loaded, report.reason) == (COUNT, "") and pair.arrived()
    assert pair.links[1].usable


def test_two_hundred_legs_wait_at_one_node(pair: Pair) -> None:
    lookups = Lookups(pair.links[1])
    try:
        chains = [new_keys(4) for _ in range(200)]
        for number, keys in enumerate(chains):
            question = LookupRequest(
                f"r{number}", b"".join(keys), 4, time.monotonic() + WAIT_S, node=pair.nodes[0]
            )
            lookups.ask(question)
        wait_until(lambda: pair.waits() == 200, "all wait")
        for keys in chains[:100]:
            pair.client.put_many(keys, [b"x"] * 4, prefer_node=pair.nodes[0])
        pair.client.give_up([key for keys in chains[100:] for key in keys], node=pair.nodes[0])
        for number in range(200):
            answer = wait_until(lambda number=number: lookups.take(f"r{number}"), "an answer")
            wanted = LookupOutcome.FOUND if number < 100 else LookupOutcome.TIMEOUT
            assert (answer.outcome, sum(answer.present)) == (wanted, 4 if number < 100 else 0)
    finally:
        lookups.close()
    wait_until(lambda: pair.waits() == 0, "no wait is left")


def test_when_the_node_dies_blocks_come_through_the_other_one(tmp_path: Path) -> None:
    pair = Pair(tmp_path / "pool")
    try:
        keys = new_keys()
        pair.stream(keys, node=pair.nodes[1])
        wait_until(lambda: pair.waits() == 1, "it waits")
        pair.cluster.kill(pair.nodes[1])
        pair.save(keys, node=pair.nodes[1])
        report = wait_for(pair.reader, pair.reader.take_loads)
        assert (report.loaded, report.reason) == (COUNT, "") and pair.arrived()
    finally:
        pair.close()
