"""Memory behind the whole arena before the first block: it is the node's own, and it is there.

Without this, pages come when a block is first written, are charged to the process that writes it (an engine, through
shared memory), and memory that the host does not have ends that process hours later.
"""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import Any, Protocol

from mooncache.client.native_call import call_native
from mooncache.errors import ConfigInvalid, NoSpace
from mooncache.runtime.clock import Clock
from mooncache.runtime.logs import Event, get_logger
from mooncache.store_node.state import ArenaKind

_STEP_BYTES = 1 << 30
_THREADS_MAX = 8
_LOG_EVERY_S = 5.0

log = get_logger(__name__)


class Arena(Protocol):
    """The part of the native server that this needs."""

    def arena(self) -> dict[str, Any]: ...
    def populate(self, offset: int, length: int, threads: int, /) -> None: ...


async def prefault(core: Arena, clock: Clock, *, is_adopted: bool = False) -> None:
    """Put memory behind an arena in host memory, with progress in the log; other kinds have theirs from the start, and
    so has memory that was adopted whole: clients wait for that start.

    Raises:
        ConfigInvalid: the host, or the process' memory cgroup, has less than the arena needs.
    """
    arena = core.arena()
    if arena["kind"] != ArenaKind.MEMORY:
        return
    size_bytes = arena["size_bytes"]
    if is_adopted and arena["resident_bytes"] >= size_bytes:
        return
    if arena["page_bytes"] == os.sysconf("SC_PAGE_SIZE"):  # huge pages were taken from their pool already
        check_memory(size_bytes - arena["resident_bytes"], memory_left_bytes())
    started_s = logged_s = clock.now_s()
    threads = min(_THREADS_MAX, os.cpu_count() or 1)
    for offset in range(0, size_bytes, _STEP_BYTES):
        try:
            await asyncio.to_thread(call_native, core.populate, offset, _STEP_BYTES, threads)
        except NoSpace as error:
            raise _too_large(size_bytes, error.message) from error
        if clock.now_s() - logged_s >= _LOG_EVERY_S:
            logged_s = clock.now_s()
            log.info(Event.NODE_ARENA_FILLS, bytes=min(offset + _STEP_BYTES, size_bytes), of_bytes=size_bytes)
    log.info(Event.NODE_ARENA_READY, bytes=size_bytes, seconds=round(clock.now_s() - started_s, 3))


def describe(core: Arena) -> None:
    """Say in the log what the arena is made of, and why not of huge pages."""
    arena = core.arena()
    log.info(
        Event.NODE_ARENA,
        kind=arena["kind"],
        description=arena["description"],
        bytes=arena["size_bytes"],
        page_bytes=arena["page_bytes"],
        note=arena["why_not_huge"],
    )


def check_memory(needed_bytes: int, left_bytes: int) -> None:
    """Raises ConfigInvalid when the memory is not there."""
    if needed_bytes > left_bytes:
        raise _too_large(needed_bytes, f"{left_bytes >> 20} MiB are left")


def _too_large(size_bytes: int, why: str) -> ConfigInvalid:
    return ConfigInvalid(
        f"There is no memory for {size_bytes >> 20} MiB of blocks: {why}. Set a smaller store_node.capacity_bytes."
    )


def memory_left_bytes(root: Path = Path("/")) -> int:
    """What this process may still take: of the host, and of each memory cgroup that it is in."""
    left = [_available_bytes(root), *_cgroups_left_bytes(root)]
    return max(0, min(left))


def _available_bytes(root: Path) -> int:
    try:
        for line in (root / "proc/meminfo").read_text(encoding="ascii").splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except (OSError, ValueError, IndexError):
        pass
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _cgroups_left_bytes(root: Path) -> list[int]:
    """Of each group of cgroup v2 that has a limit: from this process' own to the root that it can see."""
    try:
        lines = (root / "proc/self/cgroup").read_text(encoding="utf-8").splitlines()
    except OSError:
        return []
    own = next((line[3:] for line in lines if line.startswith("0::")), "/")
    left = []
    for group in [Path(own), *Path(own).parents]:
        folder = root / "sys/fs/cgroup" / str(group).lstrip("/")
        try:
            limit = (folder / "memory.max").read_text(encoding="ascii").strip()
            used = int((folder / "memory.current").read_text(encoding="ascii"))
            statistics = (folder / "memory.stat").read_text(encoding="ascii").splitlines()
            # the kernel drops these pages of files before it refuses memory
            cache = next(
                (int(line.split()[1]) for line in statistics if line.startswith("inactive_file ")), 0
            )
            if limit != "max":
                left.append(int(limit) - used + cache)
        except (OSError, ValueError, IndexError):
            continue
    return left
