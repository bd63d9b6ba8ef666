"""Deletes files, and batches that have ended, when they are as old as they may be."""

from __future__ import annotations

import asyncio

from mooncache.gateway.state import GatewayState


async def run(state: GatewayState) -> None:
    """One look. Raises OSError."""
    store, wall_s = state.batches, state.clock.wall_s()
    if store is None:
        return
    oldest_s = wall_s - state.config.gateway.batch_age_max_s
    for batch in list(store.batches.values()):
        if batch.has_ended and batch.at.get(batch.status, batch.created_at) <= oldest_s:
            await asyncio.to_thread(store.delete_batch, batch.id)
    in_use = store.in_use()
    for found in list(store.files.values()):
        if found.expires_at <= wall_s and found.id not in in_use:
            await asyncio.to_thread(store.delete_file, found.id)
