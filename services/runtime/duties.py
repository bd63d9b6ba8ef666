"""Background duties: what a process does on its own, one file each, behind one runner.

A duty that fails is logged with its code, counted, and tried again after a growing pause; it never ends the
process and never falls silent. A duty whose `run` returns is begun again after `interval_s`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Final

from mooncache.errors import Internal, MooncacheError
from mooncache.runtime.backoff import step_s
from mooncache.runtime.clock import Clock
from mooncache.runtime.logs import Event, get_logger
from mooncache.runtime.tasks import cancel_all

PAUSE_FIRST_S: Final = 0.1
PAUSE_MAX_S: Final = 5.0

log = get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Duty:
    """`run` does the work once (or forever); `interval_s` is the pause between two runs."""

    name: str
    run: Callable[[], Awaitable[None]]
    interval_s: float = 1.0


class DutyRunner:
    """Runs duties from `start` to `stop`. `on_failure(duty, code)` counts."""

    def __init__(self, clock: Clock, on_failure: Callable[[str, str], None] | None = None) -> None:
        self._clock = clock
        self._on_failure = on_failure
        self._tasks: list[asyncio.Task[None]] = []

    def start(self, duties: Sequence[Duty]) -> None:
        """Begin; may be called again with further duties."""
        self._tasks += [asyncio.create_task(self._repeat(duty), name=f"duty {duty.name}") for duty in duties]

    async def stop(self) -> None:
        """Cancel all duties and wait until they are gone."""
        tasks, self._tasks = self._tasks, []
        await cancel_all(tasks)

    async def _repeat(self, duty: Duty) -> None:
        failures = 0
        while True:
            try:
                await duty.run()
            except Exception as error:  # noqa: BLE001  (whatever it was, it is logged, counted and tried again)
                self._failed(duty, error, failures)
                pause_s = step_s(failures, PAUSE_FIRST_S, PAUSE_MAX_S)
                failures += 1
                await self._clock.sleep(pause_s)
                continue
            if failures:
                log.info(Event.DUTY_RECOVERED, duty=duty.name, failures=failures)
                failures = 0
            await self._clock.sleep(duty.interval_s)

    def _failed(self, duty: Duty, error: Exception, failures: int) -> None:
        code = error.name if isinstance(error, MooncacheError) else Internal.name
        if self._on_failure is not None:
            self._on_failure(duty.name, code)
        if isinstance(error, MooncacheError):
            log.warning(
                Event.DUTY_FAILED, duty=duty.name, code=code, reason=error.message, failures=failures + 1
            )
        else:
            log.error(Event.DUTY_FAILED, duty=duty.name, code=code, failures=failures + 1, exc_info=error)
