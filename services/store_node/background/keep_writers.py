"""Duty: keep the names of writers in their file, so that a restart knows them."""

from __future__ import annotations

import asyncio
from typing import Final

from mooncache.runtime.clock import Clock
from mooncache.store_node.writers import NodeWriters

INTERVAL_S: Final = 2.0


async def run(writers: NodeWriters, clock: Clock) -> None:
    """Until cancelled."""
    while True:
        await asyncio.to_thread(writers.keep_names)
        await clock.sleep(INTERVAL_S)
