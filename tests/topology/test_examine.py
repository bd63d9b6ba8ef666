"""What a process finds out about its host, and what becomes of it on the way to another process."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from mooncache.config import load
from mooncache.topology.core.host_facts import ArenaFacts, HostFacts, from_json, to_json
from mooncache.topology.core.model import Host
from mooncache.topology.examine import examine, look_at_folder, memory_limit_bytes
from mooncache.topology.sysfs import Sysfs


def test_this_host(tmp_path: Path) -> None:
    settings = {"cluster.state_dir": tmp_path, "store_node.ssd_bytes": 8 << 20, "gateway.host": "0.0.0.0"}
    facts = examine(
        load(env={}, overrides=settings),
        arena=ArenaFacts(1 << 20, "memory"),
        ssd_paths=[str(tmp_path)],
        memory_left_bytes=5,
    )
    assert facts.memory_bytes == os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 1024 * 1024
    assert facts.open_files > 0
    (disk,) = facts.disks
    assert (disk.what, disk.wanted_bytes, disk.error) == ("ssd", 8 << 20, "")
    assert disk.free_bytes > 0
    assert disk.file_system
    assert facts.open_binds == ("gateway.host = 0.0.0.0",)
    assert [file.error for file in facts.private_files] == ["does not exist"]
    assert from_json(to_json(facts)) == facts


def test_folders_of_a_tier(tmp_path: Path) -> None:
    (tmp_path / "node-1.log").write_bytes(b"x" * 100_000)
    assert look_at_folder("ssd", tmp_path, 1, "node-1").present_bytes >= 100_000
    assert look_at_folder("ssd", tmp_path, 1, "node-2").present_bytes == 0
    missing = look_at_folder("ssd", tmp_path / "a" / "b", 1)
    assert missing.error == "No such file or directory"
    assert [path.name for path in tmp_path.iterdir()] == ["node-1.log"], "nothing is left there"


def test_the_smallest_limit_of_all_groups_counts(tmp_path: Path) -> None:
    (tmp_path / "proc" / "self").mkdir(parents=True)
    (tmp_path / "proc" / "self" / "cgroup").write_text("0::/a/b\n")
    inner = tmp_path / "sys" / "fs" / "cgroup" / "a" / "b"
    inner.mkdir(parents=True)
    assert memory_limit_bytes(Sysfs(tmp_path)) == 0
    (inner / "memory.max").write_text("max\n")
    (inner.parent / "memory.max").write_text("4096\n")
    assert memory_limit_bytes(Sysfs(tmp_path)) == 4096


@pytest.mark.parametrize("data", [b"", b"[]", b'{"host": 1}', b"{" * 5000, b" " * (2 << 20)])
def test_hostile_descriptions(data: bytes) -> None:
    with pytest.raises(ValueError, match="description"):
        from_json(data)


def test_a_shorter_description_has_defaults() -> None:
    assert from_json(b'{"host": {"name": "h"}, "later": 1}') == HostFacts(Host("h"))
