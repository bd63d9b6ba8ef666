"""Duty: bring a changed quarantine into force, and try again while blocks of a quarantined writer are left."""

from __future__ import annotations

import asyncio
from typing import Final

from mooncache.runtime.clock import Clock
from mooncache.store_node.quarantine import NodeQuarantine

RETRY_S: Final = 1.0


async def run(quarantine: NodeQuarantine, clock: Clock) -> None:
    """Until cancelled."""
    while True:
        await quarantine.changed.wait()
        quarantine.changed.clear()
        if not await asyncio.to_thread(quarantine.enforce):
            quarantine.changed.set()
            await clock.sleep(RETRY_S)
