"""Blocks in a directory that two store nodes share: what one wrote the other one answers with, also when the writer
was killed; the writer takes its log over when it comes back, and what was removed stays removed."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest

import mooncache
from mooncache.cluster.embedded import ClusterSettings, EmbeddedCluster
from mooncache.config import Config
from mooncache.errors import ConfigInvalid
from mooncache.store_node.identity import NodeIdentity
from mooncache.store_node.metric_help import HELP
from mooncache.store_node.metrics import families
from mooncache.store_node.native_settings import server_settings
from tests.conditions import wait_until
from tests.store_node.questions import counter, reaches, read, tier_of

MIB = 1 << 20
BLOCK = 256 << 10
NODES = ("node-1", "node-2")


def value_of(number: int) -> bytes:
    return number.to_bytes(4, "little") * (BLOCK // 4)


def shared(cluster: EmbeddedCluster, node: str, name: str) -> int:
    """A counter of a node's shared tier."""
    return counter(cluster, node, f"shared_{name}")


def written(cluster: EmbeddedCluster, count: int) -> bool:
    return sum(shared(cluster, node, "blocks") for node in NODES) >= count


def test_settings_reach_the_native_server(tmp_path: Path) -> None:
    section = {"shared_path": tmp_path, "shared_bytes": "20GiB", "shared_scan_ms": 500}
    identity = NodeIdentity("node-1", "host", 1, "0", 0)
    config = Config.model_validate({"store_node": section})
    settings = server_settings(config, identity, 64 * MIB, bytes(32))
    assert settings["shared_path"] == str(tmp_path)
    assert settings["shared_bytes"] == 20 << 30
    assert settings["shared_scan_ms"] == 500
    off = server_settings(Config.model_validate({}), identity, 64 * MIB, bytes(32))
    assert not [name for name in off if name.startswith("shared")], "off by default"


def test_a_directory_that_is_not_there_is_not_made(tmp_path: Path) -> None:
    from mooncache._native import StoreServer
    from mooncache.client.native_call import call_native

    identity = NodeIdentity("node-1", "host", 1, "0", 0)
    missing = {
        "cluster": {"state_dir": tmp_path},
        "store_node": {"shared_path": tmp_path / "not" / "mounted"},
    }
    settings = server_settings(Config.model_validate(missing), identity, 64 * MIB, bytes(32))
    with pytest.raises(ConfigInvalid, match="not/mounted"):
        call_native(StoreServer, settings)
    assert not (tmp_path / "not").exists()


def test_each_counter_has_its_words() -> None:
    kinds = {family.name: family.type for family in families({"shared_blocks": 3, "shared_other_reads": 4})}
    assert kinds["mooncache_store_node_shared_blocks"] == "gauge"
    assert kinds["mooncache_store_node_shared_other_reads"] == "counter"
    assert "shared_other_reads" in HELP


def test_blocks_outlive_their_node(tmp_path: Path) -> None:
    (tmp_path / "shared").mkdir()
    env = {"METRICS_ENABLED": "true", "STORE_NODE_SHARED_BYTES": "256MiB", "STORE_NODE_SHARED_SCAN_MS": "50"}
    settings = ClusterSettings(
        state_dir=tmp_path / "state",
        nodes=2,
        capacity_bytes=16 * MIB,
        shared_path=tmp_path / "shared",
        port=0,
        extra_env=tuple((f"MOONCACHE_{name}", value) for name, value in env.items()),
    )
    cluster = EmbeddedCluster(settings)
    cluster.start()
    try:
        with mooncache.connect(**cluster.client_settings()) as client:
            values = {f"block-{number}": value_of(number) for number in range(320)}  # 80 MiB through 32
            for number, (key, value) in enumerate(values.items()):
                client.put(key, value)
                if (
                    number % 4 == 3 and number > 128
                ):  # a put never waits: the directory gets the time to follow
                    wait_until(partial(written, cluster, (number - 128) // 2), "it follows", every_s=0.01)
            assert {path.name for path in (tmp_path / "shared").iterdir()} == {
                f"{node}.mooncache" for node in NODES
            }
            below = [key for key in values if tier_of(client, key) == "shared"]
            assert len(below) > 60
            removed, kept = below[0], below[1:]
            match = client.match(kept[:1])
            assert {copy.tier for copy in match.copies[0]} == {"shared"}
            assert client.remove(removed)
            own = shared(cluster, "node-1", "blocks")
            assert own > 20
            wait_until(
                lambda: shared(cluster, "node-2", "other_blocks") >= own - 1, "node-2 knows node-1's log"
            )
            cluster.kill("node-1")
            before = shared(cluster, "node-2", "other_reads")
            for key in kept:
                assert wait_until(partial(read, client, key), f"{key} of the directory") == values[key]
            assert shared(cluster, "node-2", "other_reads") > before + 10, (
                "blocks of the node that was killed"
            )
            assert not client.exists(removed)
            cluster.restart("node-1")
            cluster.wait_ready(60)
            wait_until(
                partial(reaches, cluster, "node-1", "shared_recovered_blocks", 20), "its log is taken over"
            )
            wait_until(partial(reaches, cluster, "node-1", "shared_answering", 1), "it reads the other log")
            assert not client.exists(removed), "a removed block came back"
            for key in kept[:20]:
                assert wait_until(partial(read, client, key), f"{key} after the restart") == values[key]
    finally:
        cluster.stop()
