"""Telling store nodes which blocks will not come: beside everything else, a few calls at a time, each with a limit.

A call that fails is counted and forgotten: those who wait have a time limit of their own.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Final

from mooncache.conductor.core.give_ups import GiveUp
from mooncache.conductor.shell.instruments import ConductorMetrics
from mooncache.conductor.shell.pool import PoolLookup
from mooncache.errors import DeadlineExceeded, MooncacheError
from mooncache.runtime.logs import Event, get_logger
from mooncache.runtime.tasks import cancel_all

AT_ONCE: Final = 4  # a node that does not answer keeps others waiting no longer than lookups can bear
OPEN_MAX: Final = 256

log = get_logger(__name__)


class GiveUpCalls:
    """The calls under way."""

    def __init__(self, pool: PoolLookup, instruments: ConductorMetrics) -> None:
        self._pool, self._instruments = pool, instruments
        self._slots = asyncio.Semaphore(AT_ONCE)
        self._tasks: set[asyncio.Task[None]] = set()

    def start(self, give_ups: Iterable[GiveUp]) -> None:
        """Begin one call for each; beyond OPEN_MAX they are dropped and counted."""
        for each in give_ups:
            if len(self._tasks) >= OPEN_MAX:
                self._instruments.gave_up(each, "dropped", 0)
                continue
            task = asyncio.create_task(self._call(each))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _call(self, each: GiveUp) -> None:
        ended, outcome = 0, "ok"
        async with self._slots:
            try:
                ended = await self._pool.give_up(each.packed, each.store_node, each.pool_tenant)
            except TimeoutError:
                outcome = DeadlineExceeded.name
            except MooncacheError as error:
                outcome = error.name
        self._instruments.gave_up(each, outcome, ended)
        log.info(
            Event.HANDOVER_GIVEN_UP,
            decision_id=each.decision_id,
            reason=each.reason,
            blocks=each.end - each.begin,
            store_node=each.store_node,
            waits_ended=ended,
            code=outcome,
        )

    async def close(self) -> None:
        """Cancel what is under way."""
        await cancel_all(self._tasks)
