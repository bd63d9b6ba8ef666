"""Blocks on a disk: they leave memory and come back, also after the node was killed; removed ones do not."""

from __future__ import annotations

import contextlib
import re
import urllib.request
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import mooncache
from mooncache.cluster.embedded import ClusterSettings, EmbeddedCluster
from mooncache.config import Config, StoreNodeSection
from mooncache.errors import ConfigInvalid, MooncacheError
from mooncache.store_node.identity import NodeIdentity
from mooncache.store_node.metrics import families
from mooncache.store_node.native_settings import server_settings, ssd_paths
from mooncache.store_node.write_budget import disk_bytes, write_bytes_per_s
from tests.conditions import wait_until

MIB = 1 << 20
BLOCK = 256 << 10


def value_of(number: int) -> bytes:
    return number.to_bytes(4, "little") * (BLOCK // 4)


def ssd(cluster: EmbeddedCluster, name: str) -> int:
    """A counter of the only node's SSD tier."""
    with urllib.request.urlopen(f"http://{cluster.parts['node-1'].metrics}/metrics", timeout=30) as answer:
        text = answer.read().decode()
    found = re.search(rf"^mooncache_store_node_ssd_{name}(?:_total)? ([0-9.e+]+)$", text, re.MULTILINE)
    assert found, name
    return int(float(found[1]))


def test_settings_reach_the_native_server(tmp_path: Path) -> None:
    section: dict[str, Any] = {"ssd_bytes": "20GiB", "ssd_write_bytes_per_s": "50MiB"}
    config = Config.model_validate({"cluster": {"state_dir": tmp_path}, "store_node": section})
    identity = NodeIdentity("node-1", "host", 1, "0", 0)
    settings = server_settings(config, identity, 64 * MIB, bytes(32))
    assert settings["ssd_bytes"] == 20 << 30
    assert settings["ssd_write_bytes_per_s"] == 50 * MIB
    assert settings["ssd_paths"] == [str(tmp_path / "ssd" / "node-1")]
    assert (tmp_path / "ssd" / "node-1").stat().st_mode & 0o777 == 0o700
    off = server_settings(Config.model_validate({}), identity, 64 * MIB, bytes(32))
    assert not [name for name in off if name.startswith("ssd")], "off by default"
    own = Config.model_validate({"store_node": {"ssd_bytes": 1 << 30, "ssd_paths": "/mnt/a, /mnt/b"}})
    assert ssd_paths(own, "node-1") == ["/mnt/a", "/mnt/b"]


def test_drive_writes_per_day_are_of_the_whole_disk(tmp_path: Path) -> None:
    sizes = {"/mnt/a": 86_400 << 20, "/mnt/b": 86_400 << 24}

    def rate(**section: float) -> int:
        return write_bytes_per_s(StoreNodeSection.model_validate(section), list(sizes), sizes.__getitem__)

    assert rate() == 0, "no limit by default"
    assert rate(ssd_dwpd=1) == 1 << 20, "the smaller disk counts"
    assert rate(ssd_dwpd=0.5) == 1 << 19
    assert rate(ssd_dwpd=0.5, ssd_write_bytes_per_s=4096) == 4096, "the lower of two limits"
    assert disk_bytes(str(tmp_path)) == disk_bytes(str(tmp_path / "blocks")) > 1 << 20
    with pytest.raises(ConfigInvalid, match="ssd_dwpd"):
        disk_bytes(str(tmp_path / "no" / "blocks"))


def test_sizes_are_gauges_and_the_rest_counts() -> None:
    kinds = {family.name: family.type for family in families({"ssd_blocks": 3, "ssd_reads": 4})}
    assert kinds["mooncache_store_node_ssd_blocks"] == "gauge"
    assert kinds["mooncache_store_node_ssd_reads"] == "counter"


def test_blocks_come_back_from_the_disk_and_after_kill_9(tmp_path: Path) -> None:
    settings = ClusterSettings(
        state_dir=tmp_path / "state", nodes=1, capacity_bytes=16 * MIB, ssd_bytes=256 * MIB, port=0
    )
    cluster = EmbeddedCluster(replace(settings, extra_env=(("MOONCACHE_METRICS_ENABLED", "true"),)))
    cluster.start()
    try:
        with mooncache.connect(**cluster.client_settings()) as client:
            values = {f"block-{number}": value_of(number) for number in range(160)}  # 40 MiB through 16
            for number, (key, value) in enumerate(values.items()):
                client.put(key, value)
                if (
                    number % 4 == 3 and number > 64
                ):  # a put never waits for a disk: it gets the time to follow
                    wait_until(partial(follows, cluster, number - 60), "the disk follows", every_s=0.01)
            here = [key for key in values if client.exists(key)]
            assert len(here) > 100, "more than fits into memory"
            on_disk = {key for key in here if tier_of(client, key) == "ssd"}
            found = {key: client.get(key) for key in here}
            # What comes up takes the room of what is coldest. That is dropped if the disk has no copy of it yet. A disk
            # that does not answer for half a second has no blocks until it answers.
            for key in on_disk:
                if found[key] is None:
                    found[key] = wait_until(partial(client.get, key), f"{key} of the disk")
            assert all(bytes(value) == values[key] for key, value in found.items() if value is not None)
            assert ssd(cluster, "reads") > 30
            below = [key for key in here if tier_of(client, key) == "ssd"]
            assert len(below) > 30
            assert client.remove(below[0])
            cluster.kill("node-1")
            cluster.restart("node-1")
            wait_until(partial(answers, client, below[1]), "the node is back")
            for key in below[1:]:
                wait_until(partial(answers, client, key), f"{key} of the disk")
            back = below[1:]
            assert not client.exists(below[0]), "a removed block came back"
            assert {key: bytes(client.get(key)) for key in back} == {key: values[key] for key in back}
            assert ssd(cluster, "recovered_blocks") >= len(back)
    finally:
        cluster.stop()


def answers(client: mooncache.Client, key: str) -> bool:
    with contextlib.suppress(MooncacheError):
        return client.exists(key)
    return False


def tier_of(client: mooncache.Client, key: str) -> str:
    found = client.stat(key)
    return found.tier if found else ""


def follows(cluster: EmbeddedCluster, count: int) -> bool:
    return ssd(cluster, "blocks") >= count
