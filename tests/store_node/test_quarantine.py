"""The quarantine of a writer at real nodes: by hand and by a verifier's word, over restarts, and its end."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import mooncache
from mooncache.client.results import Deviation
from mooncache.cluster.embedded import ClusterSettings, EmbeddedCluster
from mooncache.errors import OK
from tests.conditions import wait_until
from tests.store_node.questions import asked, value_of, writer

MIB = 1 << 20


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[EmbeddedCluster]:
    with EmbeddedCluster(
        ClusterSettings(state_dir=tmp_path / "state", nodes=2, capacity_bytes=32 * MIB, port=0)
    ) as running:
        yield running


DIFFERENT = Deviation(0.5, 1e-4, "float32")


def quarantined(cluster: EmbeddedCluster, capsys: pytest.CaptureFixture[str]) -> dict[str, dict[str, Any]]:
    """What `mooncache quarantine ls` says, by instance."""
    code, document = asked(cluster, capsys, "quarantine", "ls")
    assert code == 0
    return {row["instance"]: row for row in document["writers"]}


def refuses(client: mooncache.Client, key: str) -> bool:
    return client.put_many([key], [value_of(1)]).codes != (OK,)


def _takes(client: mooncache.Client, key: str) -> bool:
    """A put of it is stored; False while a node is away or refuses it."""
    try:
        return client.put_many([key], [value_of(1)]).codes == (OK,)
    except mooncache.MooncacheError:
        return False


def test_wrong_blocks_go_and_their_writer_is_quarantined_until_it_is_released(
    cluster: EmbeddedCluster, capsys: pytest.CaptureFixture[str]
) -> None:
    with writer(cluster, "good") as good, writer(cluster, "bad") as bad, writer(cluster, "third") as third:
        for number in range(12):
            assert good.put(f"g{number}", value_of(number))
            assert bad.put(f"b{number}", value_of(number))
            assert third.put(f"t{number}", value_of(number))
        found = good.report_wrong(["b0", "b1"], DIFFERENT)
        assert found.codes == (OK, OK)
        assert [(each.instance, each.build, each.quarantined) for each in found.writers] == [
            ("bad", "bad 1.0", True)
        ]
        wait_until(lambda: not any(good.exists(f"b{number}") for number in range(12)), "all of it went")
        assert refuses(bad, "b20")
        assert all(bytes(bad.get(f"g{number}") or b"") == value_of(number) for number in range(12)), (
            "it may read"
        )
        row = quarantined(cluster, capsys)["bad"]
        assert (row["verifiers"], row["released"]) == (["good"], False)
        assert "float32" in row["reason"]
        listed = {each["instance"]: each for each in asked(cluster, capsys, "writers")[1]["writers"]}
        assert (listed["bad"]["quarantined"], listed["good"]["quarantined"]) == (True, False)

        # A broken verifier would accuse all others: alone it has one.
        assert not good.report_wrong(["t0"], DIFFERENT).writers[0].quarantined
        assert good.get("t0") is None, "the block goes all the same"
        assert not bad.report_wrong(["t1"], DIFFERENT).writers[0].quarantined, "it is not heard"
        assert good.get("t2") is not None

        code, done = asked(cluster, capsys, "quarantine", "release", "bad", "--reason", "driver replaced")
        assert (code, done["changed"]) == (0, {row["writer"]: ["node-1", "node-2"]})
        assert quarantined(cluster, capsys)["bad"]["released"]
        wait_until(lambda: _takes(bad, "b30"), "a block of a later second is taken")
        assert asked(cluster, capsys, "quarantine", "release", "bad")[0] == 1, (
            "it is not quarantined any more"
        )


def test_a_quarantine_outlives_master_and_nodes_and_reaches_a_node_that_was_away(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = ClusterSettings(
        state_dir=tmp_path / "state",
        nodes=2,
        capacity_bytes=32 * MIB,
        port=0,
        extra_env=(("MOONCACHE_STORE_NODE_KEEP_MEMORY", "true"),),
    )
    with EmbeddedCluster(settings) as cluster, writer(cluster, "good") as good, writer(cluster, "bad") as bad:
        for number in range(24):
            assert bad.put(f"b{number}", value_of(number))
        assert good.put("g", value_of(1))
        names = settings.state_dir / "writers-node-2.json"
        wait_until(lambda: names.exists() and "bad 1.0" in names.read_text(), "names are in their file")
        cluster.kill("node-2")
        assert asked(cluster, capsys, "quarantine", "add", "bad")[0] == 2, "not without --yes"
        code, done = asked(cluster, capsys, "quarantine", "add", "bad", "--yes", "--timeout", "60s")
        assert code in (0, 1)
        assert "node-1" in next(iter(done["changed"].values()))
        cluster.kill("master")
        cluster.restart("master")
        wait_until(partial(_has, cluster, capsys, "bad"), "the new master learnt it from a node")
        cluster.restart("node-2")
        wait_until((settings.state_dir / "quarantine-node-2.json").exists, "the node heard of it")
        wait_until(lambda: not _left(bad, 24), "what it had kept in memory went")
        cluster.kill("node-1")
        cluster.restart("node-1")
        wait_until(lambda: _takes(good, "g2"), "the pool takes blocks again")
        wait_until(lambda: all(node.state == "active" for node in good.nodes()), "both nodes are back")
        assert not any(_takes(bad, f"c{number}") for number in range(8)), "both refuse it from their files"


def _has(cluster: EmbeddedCluster, capsys: pytest.CaptureFixture[str], name: str) -> bool:
    code, document = asked(cluster, capsys, "quarantine", "ls")
    return code == 0 and name in {row["instance"] for row in document["writers"]}


def _left(client: mooncache.Client, count: int) -> int:
    """How many blocks are found; all of them while nobody answers."""
    try:
        return sum(client.exists_many([f"b{number}" for number in range(count)]))
    except mooncache.MooncacheError:
        return count
