"""A recall in a directory that nodes share, beside puts that are under way, and of a writer of an older version."""

from __future__ import annotations

import threading
from functools import partial
from pathlib import Path

import pytest

import mooncache
from mooncache.client.results import Deviation
from mooncache.cluster.embedded import ClusterSettings, EmbeddedCluster
from mooncache.errors import MooncacheError
from tests.conditions import wait_until
from tests.store_node.questions import asked, counter, tier_of, value_of, writer

MIB = 1 << 20
BLOCK = 256 << 10
NODES = ("node-1", "node-2")
VALUE = partial(value_of, size=BLOCK)


def in_directory(cluster: EmbeddedCluster, count: int) -> bool:
    return sum(counter(cluster, node, "shared_blocks") for node in NODES) >= count


def held(client: mooncache.Client, keys: list[str]) -> bool:
    """Whether one of the blocks is found; True while a node does not answer."""
    try:
        return any(client.exists_many(keys))
    except MooncacheError:
        return True


def test_a_recall_reaches_a_directory_that_nodes_share(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "shared").mkdir()
    env = {"METRICS_ENABLED": "true", "STORE_NODE_SHARED_BYTES": "256MiB", "STORE_NODE_SHARED_SCAN_MS": "50"}
    settings = ClusterSettings(
        state_dir=tmp_path / "state",
        nodes=2,
        capacity_bytes=8 * MIB,
        shared_path=tmp_path / "shared",
        port=0,
        extra_env=tuple((f"MOONCACHE_{name}", value) for name, value in env.items()),
    )
    with EmbeddedCluster(settings) as cluster, writer(cluster, "good") as good, writer(cluster, "bad") as bad:
        keys: list[str] = []
        for number in range(120):  # 30 MiB through 16
            client, name = (good, "g") if number % 2 else (bad, "b")
            keys.append(f"{name}{number}")
            client.put(keys[-1], VALUE(number))
            if number % 4 == 3 and number > 64:
                wait_until(partial(in_directory, cluster, (number - 64) // 2), "it follows", every_s=0.01)
        below = [key for key in keys if tier_of(good, key) == "shared"]
        good_below, bad_below = ([key for key in below if key[0] == name] for name in "gb")
        assert len(good_below) > 5
        assert len(bad_below) > 5
        own = counter(cluster, "node-1", "shared_blocks")
        wait_until(
            lambda: counter(cluster, "node-2", "shared_other_blocks") >= own - 1, "node-2 knows node-1's log"
        )
        code, receipt = asked(cluster, capsys, "recall", "--writer", "bad", "--yes", "--timeout", "60s")
        assert (code, receipt["complete"]) == (0, True)
        assert receipt["disk_block_count"] > 5, "what lies in the directory alone"
        assert receipt["block_count"] + receipt["disk_block_count"] >= len(bad_below)
        written = [key for key in keys if key[0] == "b"]
        wait_until(lambda: not held(good, written), "after a scan no node answers with one")
        cluster.kill("node-1")
        assert wait_until(lambda: held(good, good_below), "the others' blocks are served")
        cluster.restart("node-1")
        cluster.wait_ready(60)
        wait_until(lambda: not held(good, written), "the log was taken over without them")
        assert [key for key in good_below if good.exists(key)], "the good writer's are there"


def test_puts_that_race_a_recall_are_recalled_or_later(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = ClusterSettings(state_dir=tmp_path / "state", nodes=2, capacity_bytes=64 * MIB, port=0)
    with EmbeddedCluster(settings) as cluster, writer(cluster, "good") as good, writer(cluster, "bad") as bad:
        assert good.put("g", VALUE(1))
        stop, begun = threading.Event(), threading.Event()
        stored: list[str] = []

        def put() -> None:
            number = 0
            while not stop.is_set():
                key = f"b{number}"
                if bad.put_many([key], [VALUE(number)]).codes == (0,):
                    stored.append(key)
                    begun.set()
                number += 1

        thread = threading.Thread(target=put)
        thread.start()
        try:
            assert begun.wait(60)
            code, receipt = asked(
                cluster, capsys, "recall", "--writer", "bad", "--yes", "--refuse", "1h", "--timeout", "60s"
            )
        finally:
            stop.set()
            thread.join(60)
        assert (code, receipt["complete"]) == (0, True)
        assert receipt["block_count"] > 0
        assert stored
        assert not any(bad.exists_many(stored)), "a put that was answered before the recall is gone, too"
        assert bad.put_many(["later"], [VALUE(2)]).codes != (0,)
        assert bytes(good.get("g") or b"") == VALUE(1)


def test_blocks_of_a_writer_that_says_nothing_of_itself_are_in_no_recall(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A client from before writers were known: its hello has none."""
    from mooncache.client import options

    settings = ClusterSettings(state_dir=tmp_path / "state", nodes=1, capacity_bytes=16 * MIB, port=0)
    with EmbeddedCluster(settings) as cluster, writer(cluster, "new") as new:
        with monkeypatch.context() as patched:
            patched.setattr(options, "writer_settings", lambda *_: {})
            older = writer(cluster, "older")
        with older:
            assert older.put("o", VALUE(1))
            assert new.put("n", VALUE(2))
            code, listed = asked(cluster, capsys, "writers")
            found = {row["writer"]: row for row in listed["writers"]}
            assert code == 0
            assert found[""]["block_count"] == 1
            assert not asked(cluster, capsys, "stat", "o")[1].get("origin")
            assert asked(cluster, capsys, "recall", "--writer", "older", "--yes")[0] == 1, "it is not known"
            wrong = new.report_wrong(["o"], Deviation(1.0, 1e-4, "float32"))
            assert [(each.writer_id, each.quarantined) for each in wrong.writers] == [(0, False)]
            assert not new.exists("o"), "a wrong block goes, whoever wrote it"
            assert new.exists("n")
