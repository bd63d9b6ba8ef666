"""A node's memory is there, and is the node's, before anybody stores a block."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

import pytest

from mooncache.config import Config
from mooncache.errors import ConfigInvalid
from mooncache.runtime.clock import SystemClock
from mooncache.store_node.host_memory import memory_left_bytes
from mooncache.store_node.prefault import check_memory, prefault
from mooncache.store_node.service import StoreNodeService

MIB = 1 << 20


def service(folder: Path, **node: Any) -> StoreNodeService:
    settings = {"capacity_bytes": 24 * MIB, "unix_enabled": False, **node}
    return StoreNodeService(Config.model_validate({"cluster": {"state_dir": folder}, "store_node": settings}))


@pytest.mark.parametrize("on", [True, False])
async def test_all_pages_are_there_before_the_first_put(tmp_path: Path, on: bool) -> None:
    node = service(tmp_path, prefault=on)
    try:
        await node.build()
        arena = node.state.core.arena()
        assert node.state.core.stats()["store_commits"] == 0
        assert (arena["resident_bytes"] >= 24 * MIB) is on
        assert arena["page_bytes"] in (4096, 16384, 65536, 2 * MIB)
    finally:
        await node.shutdown()


async def test_a_node_without_memory_does_not_start(tmp_path: Path) -> None:
    node = service(tmp_path, capacity_bytes=16 << 40, huge_pages=False)
    try:
        with pytest.raises(ConfigInvalid, match=r"no memory for 16777216 MiB of blocks: \d+ MiB are left"):
            await node.build()
    finally:
        await node.shutdown()


async def test_memory_that_goes_while_the_arena_fills_ends_the_start(tmp_path: Path) -> None:
    from mooncache import _native

    class Full:
        """A server whose host runs out of memory in the second GiB."""

        def __init__(self) -> None:
            self.offsets: list[int] = []

        def arena(self) -> dict[str, Any]:
            return {"kind": "memory", "size_bytes": 3 << 30, "resident_bytes": 3 << 30, "page_bytes": 2 * MIB}

        def populate(self, offset: int, length: int, threads: int, /) -> None:
            self.offsets.append(offset)
            if offset:
                raise RuntimeError(300, "NO_SPACE", "the host has no memory left for the arena")

    assert hasattr(_native.StoreServer, "populate")
    full = Full()
    with pytest.raises(ConfigInvalid, match="no memory left for the arena"):
        await prefault(full, SystemClock())
    assert full.offsets == [0, 1 << 30]


def test_what_is_left_is_the_least_of_host_and_cgroups(tmp_path: Path) -> None:
    def write(path: str, text: str) -> None:
        file = tmp_path / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)

    def group(path: str, limit: str, current: int) -> None:
        write(f"sys/fs/cgroup/{path}memory.max", limit)
        write(f"sys/fs/cgroup/{path}memory.current", str(current))
        write(f"sys/fs/cgroup/{path}memory.stat", f"anon 1\ninactive_file {MIB}\n")

    write("proc/meminfo", "MemTotal: 9000000 kB\nMemAvailable:   8388608 kB\n")
    assert memory_left_bytes(tmp_path) == 8 << 30
    write("proc/self/cgroup", "0::/pod/node\n")
    group("pod/node/", "max", 5)
    assert memory_left_bytes(tmp_path) == 8 << 30
    group("pod/", str(100 * MIB), 40 * MIB)
    assert memory_left_bytes(tmp_path) == 61 * MIB, "pages of files count as free"
    group("", str(50 * MIB), 60 * MIB)
    assert memory_left_bytes(tmp_path) == 0
    check_memory(MIB, MIB)
    with pytest.raises(ConfigInvalid, match="no memory for 2 MiB of blocks: 1 MiB are left"):
        check_memory(2 * MIB, MIB)


@pytest.mark.parametrize(
    ("resident_bytes", "is_adopted", "filled"),
    [(8 * MIB, True, False), (8 * MIB, False, True), (4 * MIB, True, True)],
)
async def test_memory_that_was_adopted_whole_is_not_filled_again(
    resident_bytes: int, is_adopted: bool, filled: bool
) -> None:
    class Adopted:
        offsets: ClassVar[list[int]] = []

        def arena(self) -> dict[str, Any]:
            sizes = {"size_bytes": 8 * MIB, "resident_bytes": resident_bytes, "page_bytes": 4096}
            return {"kind": "memory", **sizes}

        def populate(self, offset: int, length: int, threads: int, /) -> None:
            self.offsets.append(offset)

    core = Adopted()
    core.offsets.clear()
    await prefault(core, SystemClock(), is_adopted=is_adopted)
    assert bool(core.offsets) is filled
