"""Blocks move to a node that joins, with real processes: every get is right meanwhile, also when the node dies."""

from __future__ import annotations

import os
import threading
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

import mooncache
from mooncache.client.keys import to_block_key
from mooncache.errors import NodeUnavailable
from tests.client.conftest import make_cluster
from tests.client.test_repair import asked
from tests.conditions import wait_until

pytestmark = pytest.mark.slow

KEYS = [f"block-{n}" for n in range(200)]
VALUES = [os.urandom(64 << 10) for _ in KEYS]
NAMES = {to_block_key(key): key for key in KEYS}
SETTINGS = {
    "MOONCACHE_MASTER_REPLICAS": "2",
    "MOONCACHE_MASTER_REPAIR_GRACE_S": "0.5",
    "MOONCACHE_MASTER_REBALANCE_BYTES_PER_S": "1MiB",
    "MOONCACHE_MASTER_HEARTBEAT_INTERVAL_S": "0.25",
    "MOONCACHE_MASTER_LEASE_S": "3",
}


class Reader:
    """Reads all blocks again and again; `wrong` names those that were not as they were put."""

    def __init__(self, settings: dict[str, Any]) -> None:
        self._settings, self._end = settings, threading.Event()
        self.rounds, self.wrong = 0, set[str]()
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> Reader:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._end.set()
        self._thread.join()

    def _run(self) -> None:
        with mooncache.connect(**self._settings, timeout_s=10) as pool:
            while not self._end.wait(0.1):
                got = list(pool.get_many(KEYS))
                self.wrong.update(
                    key for key, value, want in zip(KEYS, got, VALUES, strict=True) if value != want
                )
                self.rounds += 1


def copies(pool: mooncache.Client) -> tuple[Counter[str], Counter[str]]:
    """Copies of each block, and blocks on each node; nothing while a node is gone and in the map."""
    of_block, on_node = Counter[str](), Counter[str]()
    try:
        for entry in pool.list(limit=1_000_000):
            of_block[NAMES[entry.key]] += 1
            on_node[entry.node_id] += 1
    except NodeUnavailable:
        return Counter(), Counter()  # the map still names a node that was killed
    return of_block, on_node


def active(pool: mooncache.Client) -> int:
    return sum(node.state == "active" for node in pool.nodes())


def test_blocks_move_to_a_node_that_joins_also_after_it_died_in_mid_move(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cluster = make_cluster(tmp_path, nodes=4, capacity_bytes=16 << 20, **SETTINGS)
    cluster.start()
    try:
        settings = cluster.client_settings()

        def rebalance() -> dict[str, Any]:
            found: dict[str, Any] = asked(cluster, capsys, "repair", "status")["rebalance"]
            return found

        with mooncache.connect(**settings, timeout_s=10) as pool:
            cluster.kill("node-4")
            wait_until(lambda: active(pool) == 3, "three nodes")
            pool.put_many(KEYS, VALUES, replicas=2).raise_for_errors()
            with Reader(settings) as reader:
                cluster.restart("node-4")
                seen: list[dict[str, Any]] = []

                def ten_moved() -> bool:
                    seen.append(rebalance())
                    return seen[-1]["moved_block_count"] >= 10

                wait_until(ten_moved, lambda: f"moves: {rebalance()}")
                shown = seen[-1]
                assert shown["state"] == "moving" and shown["left_bytes"] > 0 and shown["estimate_s"] > 0
                cluster.kill("node-4")
                wait_until(lambda: active(pool) == 3, "three nodes again")
                wait_until(lambda: _two_of_each(copies(pool)), "two copies of each block without it")
                cluster.restart("node-4")
                wait_until(lambda: active(pool) == 4, "four nodes")
                wait_until(lambda: copies(pool)[1]["node-4"] >= 80, lambda: f"{copies(pool)} {rebalance()}")
                wait_until(lambda: rebalance()["state"] == "at_rest", lambda: f"an end: {rebalance()}")
                rounds = reader.rounds
                wait_until(lambda: reader.rounds > rounds + 1, "reads after it")
            assert not reader.wrong
            wait_until(lambda: _two_of_each(copies(pool)), "two copies of each block at the end")
            counts = copies(pool)[1]
            assert sum(counts.values()) == 2 * len(KEYS)
            assert max(counts.values()) - min(counts.values()) < 0.1 * (16 << 20) / len(VALUES[0]), counts
            assert rebalance()["fullest_percent"] - rebalance()["emptiest_percent"] < 10
    finally:
        cluster.stop()


def _two_of_each(found: tuple[Counter[str], Counter[str]]) -> bool:
    return [found[0][key] for key in KEYS] == [2] * len(KEYS)
