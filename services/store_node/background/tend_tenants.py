"""Duty: count what tenants hold, end blocks that are older than their tenant's TTL, take over an edited table."""

from __future__ import annotations

import asyncio
from typing import Final

from mooncache.runtime.clock import Clock
from mooncache.store_node.tenants import NodeTenants

INTERVAL_S: Final = 1.0


async def run(tenants: NodeTenants, clock: Clock) -> None:
    """Until cancelled."""
    while True:
        tenants.read_file()
        await asyncio.to_thread(tenants.tend)
        await clock.sleep(INTERVAL_S)
