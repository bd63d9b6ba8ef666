"""Memory behind the whole arena before the first block: it is the node's own, and it is there.

Without this, pages come when a block is first written, are charged to the process that writes it (an engine, through
shared memory), and memory that the host does not have ends that process hours later.
"""

from __future__ import annotations

import asyncio
import os
import time
from typing import Any, Protocol

from mooncache.client.native_call import call_native
from mooncache.errors import ConfigInvalid, NoSpace
from mooncache.runtime.clock import Clock
from mooncache.runtime.logs import Event, get_logger
from mooncache.store_node.arena_kind import ArenaKind
from mooncache.store_node.host_memory import memory_left_bytes

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


def describe_kept(kept: dict[str, Any], why_not_kept: str) -> None:
    """Say what became of the former process' memory, and why this one's is not kept."""
    if kept["adopted"]:
        log.info(
            Event.NODE_MEMORY_ADOPTED,
            blocks=kept["blocks"],
            bytes=kept["bytes"],
            refused=kept["refused"],
            held_extents=kept["held_extents"],
            seconds=round(kept["seconds"], 6),
            threads=kept["threads"],
        )
    else:
        log.info(Event.NODE_MEMORY_COLD, reason=kept["why_not"] or "no memory was held for it")
    if why_not_kept:
        log.warning(Event.NODE_MEMORY_NOT_KEPT, reason=why_not_kept)


def describe_start(phases_s: dict[str, float]) -> None:
    """Say in the log when the steps to an open data port had ended: seconds of the monotonic clock of this host."""
    log.info(
        Event.NODE_DATA_PORT_OPEN,
        phases_s={phase: round(at_s, 4) for phase, at_s in phases_s.items()},
        processor_s=round(time.process_time(), 3),
    )


def check_memory(needed_bytes: int, left_bytes: int) -> None:
    """Raises ConfigInvalid when the memory is not there."""
    if needed_bytes > left_bytes:
        raise _too_large(needed_bytes, f"{left_bytes >> 20} MiB are left")


def _too_large(size_bytes: int, why: str) -> ConfigInvalid:
    return ConfigInvalid(
        f"There is no memory for {size_bytes >> 20} MiB of blocks: {why}. Set a smaller store_node.capacity_bytes."
    )
