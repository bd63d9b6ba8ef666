"""Letting blocks come up from disks that a planned leg will load: one call for each decision, beside everything else.

A call that fails, or for which there is no room, is counted and forgotten: the engine reads from the disk then.
"""

from __future__ import annotations

import asyncio
from typing import Final

from mooncache.conductor.core.decisions import Decision
from mooncache.conductor.core.prefetches import begin_s, keys_of
from mooncache.conductor.shell.instruments import ConductorMetrics
from mooncache.conductor.shell.pool import PoolLookup
from mooncache.errors import DeadlineExceeded, MooncacheError
from mooncache.runtime.tasks import cancel_all

OPEN_MAX: Final = 64


class PrefetchCalls:
    """The calls under way."""

    def __init__(self, pool: PoolLookup, instruments: ConductorMetrics) -> None:
        self._pool, self._instruments = pool, instruments
        self._tasks: set[asyncio.Task[None]] = set()

    def start(self, decision: Decision, keys: bytes, pool_tenant: str = "") -> None:
        """Begin the call that a decision needs, if it needs one. keys: packed, of the prompt."""
        on_ssd = keys_of(decision, keys)
        if not on_ssd:
            return
        if len(self._tasks) >= OPEN_MAX:
            self._instruments.prefetched("dropped", 0)
            return
        task = asyncio.create_task(self._call(on_ssd, begin_s(decision), pool_tenant))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _call(self, keys: bytes, within_s: float, pool_tenant: str) -> None:
        blocks, outcome = 0, "ok"
        try:
            blocks = await self._pool.prefetch(keys, within_s, pool_tenant)
        except TimeoutError:
            outcome = DeadlineExceeded.name
        except MooncacheError as error:
            outcome = error.name
        self._instruments.prefetched(outcome, blocks)

    async def close(self) -> None:
        """Cancel what is under way."""
        await cancel_all(self._tasks)
