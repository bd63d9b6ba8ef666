"""The one list of the master's periodic duties, and what runs them while this master leads.

A duty that fails is logged and tried again after its interval; it never ends the master.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from mooncache.logs import Event, get_logger
from mooncache.master.background import check_invariants, expire_members, refresh_map
from mooncache.master.background.run_tasks import TaskRunner
from mooncache.master.state import MasterState

log = get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Duty:
    """What to do, and the pause between two runs in seconds."""

    name: str
    interval_s: float
    run_once: Callable[[], Awaitable[None]]


class Duties:
    """Runs the duties from `start` to `stop`. They rest while this master does not lead."""

    def __init__(self, state: MasterState) -> None:
        self._state = state
        self._runner = TaskRunner(state)
        self._loops: list[asyncio.Task[None]] = []

    def all(self) -> list[Duty]:
        """Return every duty."""
        state, config = self._state, self._state.config
        return [
            Duty("expire_members", config.expire_interval_s, lambda: expire_members.run_once(state)),
            Duty("refresh_map", config.expire_interval_s, lambda: refresh_map.run_once(state)),
            Duty("run_tasks", config.task_interval_s, self._runner.run_once),
            Duty("check_invariants", config.check_interval_s, lambda: check_invariants.run_once(state)),
        ]

    def start(self) -> None:
        """Start all duties."""
        self._loops = [asyncio.create_task(self._repeat(duty), name=duty.name) for duty in self.all()]

    async def stop(self) -> None:
        """Stop all duties and the copies under way."""
        for loop in self._loops:
            loop.cancel()
        await asyncio.gather(*self._loops, return_exceptions=True)
        self._loops = []
        await self._runner.stop()

    async def _repeat(self, duty: Duty) -> None:
        failed = False
        while True:
            await self._state.clock.sleep(duty.interval_s)
            if not self._state.leading:
                continue
            try:
                await duty.run_once()
            except Exception as error:
                if not failed:
                    log.error(Event.DUTY_FAILED, duty=duty.name, error=repr(error), exc_info=error)
                failed = True
                continue
            if failed:
                log.info(Event.DUTY_RECOVERED, duty=duty.name)
            failed = False
