"""Duty: write the native server's events into the service's log, under their own stable codes."""

from __future__ import annotations

from typing import Protocol

import structlog

from mooncache.clock import Clock

INTERVAL_S = 0.5
_BATCH = 256
_LEVELS = {10: "debug", 20: "info", 30: "warning", 40: "error"}


class NativeLog(Protocol):
    def drain_log(self, max_events: int, /) -> list[tuple[int, str, str]]: ...


async def run(core: NativeLog, clock: Clock) -> None:
    """Until cancelled. The native side keeps a bounded number of events, so a pause loses only the oldest."""
    while True:
        relay(core)
        await clock.sleep(INTERVAL_S)


def relay(core: NativeLog) -> int:
    """Write what is there now; returns the number of lines."""
    log = structlog.get_logger(logger_name="mooncache.native")
    events = core.drain_log(_BATCH)
    for level, event, message in events:
        getattr(log, _LEVELS.get(level, "info"))(event, message=message)
    return len(events)
