"""A pool of real processes whose second node keeps its blocks in a GPU's memory: which copy is read, what is shown.

The GPU is a fake: its driver lies where the node's process finds it under the usual name.
"""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import mooncache
from mooncache.cluster.embedded import EmbeddedCluster
from mooncache.cluster.processes import Part
from tests.client.conftest import make_cluster
from tests.conditions import wait_until
from tests.gpu.fake_gpu import library

MIB = 1 << 20
GPU_NODE = "gpu-node"


@pytest.fixture
def driver_folder(tmp_path: Path) -> Path:
    folder = tmp_path / "driver"
    folder.mkdir()
    (folder / "libcuda.so.1").symlink_to(library())
    return folder


@pytest.fixture
def pool(tmp_path: Path, driver_folder: Path) -> Iterator[tuple[EmbeddedCluster, Part]]:
    """A master, a node with 64 MiB of host memory, and one with 16 MiB of a GPU."""
    cluster = make_cluster(tmp_path / "state", nodes=1)
    cluster.start()
    usual = cluster.parts["node-1"]
    gpu = dataclasses.replace(
        usual,
        name=GPU_NODE,
        env={
            **usual.env,
            "LD_LIBRARY_PATH": str(driver_folder),
            "MOONCACHE_STORE_NODE_NODE_ID": GPU_NODE,
            "MOONCACHE_STORE_NODE_PORT": "0",
            "MOONCACHE_STORE_NODE_METRICS_PORT": "0",
            "MOONCACHE_STORE_NODE_UNIX_PATH": str(tmp_path / "gpu.sock"),
            "MOONCACHE_STORE_NODE_ARENA_DEVICE": "cuda:0",
            "MOONCACHE_STORE_NODE_CAPACITY_BYTES": str(16 * MIB),
        },
        log_path=tmp_path / "gpu-node.log",
        process=None,
    )
    gpu.start()
    try:
        yield cluster, gpu
    finally:
        if gpu.process is not None:
            gpu.process.kill()
            gpu.process.wait(60)
        killed = cluster.stop()
    assert not killed


def complete(client: mooncache.Client, gpu: Part) -> dict[str, Any]:
    """The two nodes of the map by name, once both are there."""

    def both() -> dict[str, Any]:
        assert gpu.exit_code is None, gpu.log_tail()
        nodes = {node.node_id: node for node in client.nodes()}
        return nodes if len(nodes) == 2 else {}

    found: dict[str, Any] = wait_until(both, "two nodes in the map")
    return found


def test_the_copy_in_gpu_memory_is_read_and_the_other_one_when_it_dies(
    pool: tuple[EmbeddedCluster, Part],
) -> None:
    cluster, gpu = pool
    keys = [f"block-{number}" for number in range(8)]
    values = [os.urandom(300_000) for _ in keys]
    settings = cluster.client_settings()
    with (
        mooncache.connect(**settings, shm=False) as writer,
        mooncache.connect(**settings, shm=False) as reader,
        mooncache.connect(**settings) as neighbour,
    ):
        nodes = complete(writer, gpu)
        complete(reader, gpu)
        complete(neighbour, gpu)
        assert {(name, node.tier, node.arena) for name, node in nodes.items()} == {
            ("node-1", "dram", "memory"),
            (GPU_NODE, "hbm", "gpu"),
        }
        writer.put_many(keys, values, replicas=2).raise_for_errors()

        def read(client: mooncache.Client) -> set[str]:
            buffers = [bytearray(len(value)) for value in values]
            got = client.get_many_into(keys, buffers)
            got.raise_for_errors()
            assert [bytes(buffer) for buffer in buffers] == values
            return set(got.node_ids)

        assert read(writer) == {GPU_NODE}, "who put both copies knows both"
        assert reader.match(keys).leading_blocks == len(keys)
        assert read(reader) == {GPU_NODE}, "who asked knows both"
        assert neighbour.match(keys).leading_blocks == len(keys)
        assert read(neighbour) == {"node-1"}, "memory that can be mapped goes first"
        stat = reader.stat(keys[0])
        assert stat is not None
        assert (stat.node_ids, stat.tiers) == ((GPU_NODE, "node-1"), ("hbm", "dram"))
        assert {entry.tier for entry in reader.list() if entry.node_id == GPU_NODE} == {"hbm"}
        shown = subprocess.run(
            [sys.executable, "-m", "mooncache.cli", "status", "--json", "--master", settings["master"]],
            env={**os.environ, "MOONCACHE_CLUSTER_STATE_DIR": str(cluster.state_dir)},
            capture_output=True,
            timeout=60,
            check=True,
        )
        tiers = {node["node_id"]: node["tier"] for node in json.loads(shown.stdout)["nodes"]}
        assert tiers == {"node-1": "dram", GPU_NODE: "hbm"}

        assert gpu.process is not None
        gpu.process.kill()
        gpu.process.wait(60)
        for client in (reader, writer):
            assert read(client) == {"node-1"}
            assert read(client) == {"node-1"}


def test_a_full_gpu_evicts_and_the_host_keeps_its_copy(pool: tuple[EmbeddedCluster, Part]) -> None:
    """What a small node pushes out is gone there and nowhere else; without another copy it is a miss, no error."""
    cluster, gpu = pool
    settings = cluster.client_settings()
    with mooncache.connect(**settings, shm=False) as client:
        node = complete(client, gpu)[GPU_NODE]
        client.put("kept", b"k" * MIB, replicas=2)
        address = f"{GPU_NODE}@{node.tcp_host}:{node.tcp_port}"
        del settings["master"]
        with mooncache.connect(nodes=[address], **settings) as alone:
            alone.put("alone", b"a" * MIB)
            for number in range(40):
                alone.put(f"more-{number}", bytes([number]) * MIB)
        assert 0 < client.node_stat(node.index)["store_blocks"] <= 16, "of 42"
        assert client.get("alone") is None
        assert client.get("kept") == b"k" * MIB
