"""Duty: look through the blocks that a former process left, and keep what the next one needs with the holder.

Blocks are compared with their checksums at a bounded rate, the coldest first; readers compare them anyway. Extents
that a client of a former process may still write are asked about until none can. A holder that is gone costs
nothing but the next start: a new one is started and gets the same files.
"""

from __future__ import annotations

import asyncio
from typing import Any, Final, Protocol

from mooncache.client.native_call import call_native
from mooncache.runtime.clock import Clock
from mooncache.runtime.logs import Event, get_logger
from mooncache.store_node.holder import HolderError
from mooncache.store_node.keeping import MemoryKeeper

CHECK_BYTES_PER_S: Final = 1 << 30
_STEP_S: Final = 0.125
_REST_S: Final = 1.0
_HOLDER_EVERY_S: Final = 2.0

log = get_logger(__name__)


class KeptMemory(Protocol):
    """The part of the native server that this needs."""

    def kept(self) -> dict[str, Any]: ...
    def tend_kept(self, max_bytes: int, /) -> dict[str, int]: ...


async def run(core: KeptMemory, keeping: MemoryKeeper, clock: Clock) -> None:
    """Until cancelled."""
    files = core.kept()["fds"]
    looked_s, lost, finished = clock.now_s(), False, False
    while True:
        progress = await asyncio.to_thread(call_native, core.tend_kept, int(CHECK_BYTES_PER_S * _STEP_S))
        if progress["left_blocks"] == 0 and not finished:
            finished = True
            if progress["checked_blocks"]:
                log.info(
                    Event.NODE_MEMORY_CHECKED,
                    blocks=progress["checked_blocks"],
                    bytes=progress["checked_bytes"],
                    damaged=progress["damaged_blocks"],
                )
        if clock.now_s() - looked_s >= _HOLDER_EVERY_S:
            looked_s = clock.now_s()
            lost = await _look_after_holder(keeping, files, lost=lost)
        await clock.sleep(_STEP_S if progress["left_blocks"] else _REST_S)


async def _look_after_holder(keeping: MemoryKeeper, files: list[int], *, lost: bool) -> bool:
    """Whether the files are with no holder now."""
    if await asyncio.to_thread(keeping.has, len(files)):
        return False
    try:
        await asyncio.to_thread(keeping.keep, files)
    except HolderError as why:
        if not lost:
            log.warning(Event.NODE_MEMORY_NOT_KEPT, reason=str(why))
        return True
    log.info(Event.NODE_MEMORY_KEPT, holder=keeping.place, files=len(files))
    return False
