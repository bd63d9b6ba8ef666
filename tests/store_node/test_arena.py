"""Where a node's blocks lie: what the configuration asks for, and a pool whose arenas are files."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

import mooncache
from mooncache.cli import cluster as view
from mooncache.config import Config
from mooncache.config.pool import StoreNodeSection
from mooncache.errors import ConfigInvalid, TransportUnavailable
from mooncache.proto.v1 import common_pb2, master_pb2
from mooncache.reporting.output import console
from mooncache.store_node.arena_kind import ArenaKind
from mooncache.store_node.native_settings import (
    check_arena,
    quarter_of_memory_bytes,
    segment_of,
    wanted_bytes,
)
from mooncache.store_node.service import StoreNodeService
from tests.client.conftest import make_cluster
from tests.conditions import wait_until

MIB = 1 << 20


def test_the_capacity_that_the_native_server_is_asked_for(tmp_path: Path) -> None:
    file = tmp_path / "arena"
    file.touch()
    assert wanted_bytes(StoreNodeSection(capacity_bytes=5 * MIB)) == 5 * MIB
    assert wanted_bytes(StoreNodeSection()) == pytest.approx(quarter_of_memory_bytes(), rel=0.5)
    assert wanted_bytes(StoreNodeSection(arena_path=file)) == 0, "all of it"
    assert wanted_bytes(StoreNodeSection(arena_path=file, capacity_bytes=2 * MIB)) == 2 * MIB
    with pytest.raises(ConfigInvalid, match="capacity_bytes too"):
        wanted_bytes(StoreNodeSection(arena_path=tmp_path))
    with pytest.raises(ConfigInvalid, match="at least 1 MiB"):
        wanted_bytes(StoreNodeSection(arena_path=file, capacity_bytes=1))


def test_an_arena_below_one_mib_is_a_sentence(tmp_path: Path) -> None:
    check_arena({"size_bytes": MIB, "description": "/mnt/arena"})
    with pytest.raises(ConfigInvalid, match=r"/mnt/arena has 4096 bytes; it must have at least 1 MiB"):
        check_arena({"size_bytes": 4096, "description": "/mnt/arena"})


async def test_a_node_on_a_small_file_does_not_start(tmp_path: Path) -> None:
    file = tmp_path / "arena"
    file.touch(mode=0o600)
    os.truncate(file, 900_000)
    service = StoreNodeService(
        Config.model_validate(
            {
                "cluster": {"state_dir": tmp_path / "state"},
                "store_node": {"arena_path": file, "unix_enabled": False},
            }
        )
    )
    try:
        with pytest.raises(ConfigInvalid, match="at least 1 MiB"):
            await service.build()
    finally:
        await service.shutdown()


def test_an_arena_on_a_gpu_says_how_much(tmp_path: Path) -> None:
    assert wanted_bytes(StoreNodeSection(arena_device="cuda:0", capacity_bytes=3 * MIB)) == 3 * MIB
    for wrong in ({"arena_device": "cuda:0"}, {"arena_device": "cuda:0", "arena_path": tmp_path / "a"}):
        with pytest.raises(ConfigInvalid, match="needs store_node"):
            wanted_bytes(StoreNodeSection.model_validate(wrong))
    with pytest.raises(ValueError, match="arena_device"):
        StoreNodeSection(arena_device="gpu0")
    assert segment_of({"size_bytes": MIB, "kind": "gpu"}).tier == common_pb2.TIER_HBM


def test_of_all_kinds_of_arenas_only_a_gpus_is_hbm() -> None:
    on_hosts = [
        ArenaKind.MEMORY,
        ArenaKind.HUGETLBFS,
        ArenaKind.TMPFS,
        ArenaKind.DAX,
        ArenaKind.FSDAX,
        ArenaKind.FILE,
    ]
    tiers = {segment_of({"size_bytes": MIB, "kind": kind}).tier for kind in on_hosts}
    assert tiers == {common_pb2.TIER_DRAM}
    assert set(ArenaKind) - set(on_hosts) == {ArenaKind.GPU}


def test_a_wrong_path_is_a_sentence_at_start(tmp_path: Path) -> None:
    from mooncache import _native
    from mooncache.client.native_call import call_native

    settings: dict[str, Any] = {"node_id": "n", "secret": bytes(32), "incarnation": 1}
    settings["arena_path"] = str(tmp_path / "none")
    with pytest.raises(ConfigInvalid, match="does not exist; make it"):
        call_native(_native.StoreServer, settings)
    del settings["arena_path"]
    settings |= {"arena_gpu": 0, "arena_gpu_driver": str(tmp_path / "libcuda.so.1")}
    with pytest.raises(TransportUnavailable, match="CUDA unavailable, because"):
        call_native(_native.StoreServer, settings)


def test_status_shows_the_kind_of_each_arena() -> None:
    segment = segment_of({"size_bytes": MIB, "kind": "dax"})
    assert (segment.tier, segment.capacity_bytes) == (common_pb2.TIER_DRAM, MIB)
    nodes = [
        master_pb2.NodeStatus(node=common_pb2.NodeInfo(node_id=name, segments=segments))
        for name, segments in (("new", [segment]), ("old", []))
    ]
    document = view.status_document(master_pb2.GetStatusResponse(master_id="m", nodes=nodes))
    assert [node["arena"] for node in document["nodes"]] == ["dax", ""]
    assert [node["tier"] for node in document["nodes"]] == ["dram", ""]
    with console.capture() as capture:
        view._show_pool(document)
    assert "dax" in capture.get()


def test_a_pool_in_files(tmp_path: Path) -> None:
    """Two nodes, each with a file of its own without a name; clients on the host use TCP."""
    folder = tmp_path / "arenas"
    folder.mkdir(mode=0o700)
    cluster = make_cluster(tmp_path / "state", MOONCACHE_STORE_NODE_ARENA_PATH=str(folder))
    cluster.start()
    try:
        with mooncache.connect(**cluster.client_settings()) as client:
            blocks = {f"block-{number}": bytes([number]) * 300_000 for number in range(40)}
            for key, value in blocks.items():
                client.put(key, value)
            assert {key: bytes(client.get(key)) for key in blocks} == blocks
            nodes = wait_until(lambda: client.cluster().nodes, "the map")
            assert all(node.capacity_bytes == 64 * MIB for node in nodes)
        assert list(folder.iterdir()) == []
        logs = "".join(path.read_text() for path in (tmp_path / "state").rglob("*.log"))
        assert "the node starts empty" in logs
        assert "could be truncated under its readers" in logs
    finally:
        killed = cluster.stop()
    assert not killed
