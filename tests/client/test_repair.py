"""Copies that the pool keeps, with real nodes that are killed: two again, apart from each other, and no byte lost."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import mooncache
from mooncache.cli.app import run as run_cli
from mooncache.client.keys import to_block_key
from mooncache.cluster.embedded import EmbeddedCluster
from mooncache.errors import FewerReplicas, NodeUnavailable
from tests.client.conftest import make_cluster
from tests.conditions import wait_until

pytestmark = pytest.mark.slow

KEYS = [f"block-{n}" for n in range(150)]
VALUES = [os.urandom(64 << 10) for _ in KEYS]


@pytest.fixture
def four(tmp_path: Path) -> Iterator[EmbeddedCluster]:
    """Four nodes that a test may break; every block is to have two copies, and a lost node has one second."""
    cluster = make_cluster(
        tmp_path, nodes=4, MOONCACHE_MASTER_REPLICAS="2", MOONCACHE_MASTER_REPAIR_GRACE_S="1"
    )
    cluster.start()
    yield cluster
    cluster.stop()


def holders(pool: mooncache.Client) -> dict[bytes, set[str]]:
    found: dict[bytes, set[str]] = {to_block_key(key): set() for key in KEYS}
    for entry in pool.list(limit=1_000_000):
        found[entry.key].add(entry.node_id)
    return found


def all_have_two(pool: mooncache.Client, without: set[str]) -> bool:
    try:
        return all(len(where - without) >= 2 for where in holders(pool).values())
    except NodeUnavailable:
        return False  # the map still names a node that was killed


def asked(
    cluster: EmbeddedCluster, capsys: pytest.CaptureFixture[str], *arguments: str, expect: int = 0
) -> Any:
    """What a command of the CLI says of this cluster."""
    settings = cluster.client_settings()
    where = ["--master", str(settings["master"]), "--state-dir", str(cluster.state_dir)]
    assert run_cli([*arguments, *where, "--json"]) == expect
    return json.loads(capsys.readouterr().out)


def test_two_nodes_killed_one_after_the_other_take_nothing_with_them(
    four: EmbeddedCluster, capsys: pytest.CaptureFixture[str]
) -> None:
    with mooncache.connect(**four.client_settings(), timeout_s=10) as pool:
        pool.put_many(KEYS, VALUES, replicas=2).raise_for_errors()
        gone: set[str] = set()
        for victim in ("node-1", "node-2"):
            four.kill(victim)
            gone.add(victim)
            wait_until(lambda: all_have_two(pool, gone), f"two copies of each block without {gone}")
            assert list(pool.get_many(KEYS)) == VALUES
        shown = asked(four, capsys, "repair", "status", "--wait", "--timeout", "60s")
        assert shown["state"] == "whole"
        assert shown["copied_bytes"] == shown["copied_block_count"] * len(VALUES[0]) > 0
        assert shown["left_bytes"] == 0
        four.restart("node-1")
        wait_until(lambda: sum(n.state == "active" for n in pool.nodes()) == 3, "it is back, empty")
        four.kill("node-3")
        wait_until(lambda: all_have_two(pool, {"node-2", "node-3"}), "two copies again, with the new process")
        assert list(pool.get_many(KEYS)) == VALUES


def test_one_copy_becomes_two_in_different_racks_and_a_drain_loses_none(
    four: EmbeddedCluster, capsys: pytest.CaptureFixture[str]
) -> None:
    racks = {"node-1": "r1", "node-2": "r1", "node-3": "r1", "node-4": "r2"}
    for name, rack in racks.items():
        part = four.parts[name]
        part.env = {**part.env, "MOONCACHE_STORE_NODE_LABELS": f"zone=a,rack={rack}"}
        four.kill(name)
        four.restart(name)
    four.wait_ready(60)

    def labels() -> dict[str, str]:
        nodes = asked(four, capsys, "status")["nodes"]
        return {node["node_id"]: node["labels"].get("rack") for node in nodes if node["state"] == "active"}

    wait_until(lambda: labels() == racks, "the nodes in their racks")
    with mooncache.connect(**four.client_settings(), timeout_s=10) as pool:
        pool.put_many(KEYS, VALUES, replicas=1).raise_for_errors()
        wait_until(
            lambda: all({racks[name] for name in where} == {"r1", "r2"} for where in holders(pool).values()),
            "a copy of each block in either rack",
        )
        assert asked(four, capsys, "repair", "status")["spread_over"] == "rack"
        drained = asked(four, capsys, "drain", "node-4", "--timeout", "60s")
        assert drained["state"] == "done"
        wait_until(
            lambda: all_have_two(pool, {"node-4"}), "two copies of each block without the drained node"
        )
        four.kill("node-4")
        assert list(pool.get_many(KEYS)) == VALUES


def test_a_tenants_own_number_of_copies(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cluster = make_cluster(tmp_path, nodes=3, MOONCACHE_MASTER_REPAIR_GRACE_S="1")
    cluster.start()
    try:
        with mooncache.connect(**cluster.client_settings(), timeout_s=10) as pool:
            pool.put_many(KEYS, VALUES).raise_for_errors()
            assert asked(cluster, capsys, "repair", "status")["state"] == "off"
            asked(cluster, capsys, "tenant", "set", "default", "--replicas", "3")
            wait_until(
                lambda: all(len(where) == 3 for where in holders(pool).values()), "three copies of each"
            )
            assert asked(cluster, capsys, "repair", "status")["tenant_replicas"] == {"default": 3}
            assert list(pool.get_many(KEYS)) == VALUES
    finally:
        cluster.stop()


def test_a_put_with_fewer_copies_than_asked_for_says_so_and_is_no_failure(
    four: EmbeddedCluster, capsys: pytest.CaptureFixture[str]
) -> None:
    with mooncache.connect(**four.client_settings(), timeout_s=10) as pool:
        result = pool.put_many(["a", "b"], [b"one", b"two"], replicas=6)
        assert result.codes == (FewerReplicas.code,) * 2
        assert result.created == (True, True)
        assert result.ok and not result.errors
        result.raise_for_errors()
        assert pool.put("c", b"three", replicas=6)
        assert not pool.put("c", b"three", replicas=6), "it was there"
        assert pool.put_many(["d"], [b"four"], replicas=4).codes == (0,)
        assert list(pool.get_many(["a", "b", "c"])) == [b"one", b"two", b"three"]
    assert asked(four, capsys, "put", "e", "five", "--replicas", "6")["code"] == "FEWER_REPLICAS"
