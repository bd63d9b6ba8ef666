"""Duty: write the native server's events into the service's log; `what` is their own stable name."""

from __future__ import annotations

from typing import Protocol

from mooncache.runtime.clock import Clock
from mooncache.runtime.logs import Event, get_logger

INTERVAL_S = 0.5
_BATCH = 256

log = get_logger(__name__)
_WRITE = {10: log.debug, 20: log.info, 30: log.warning, 40: log.error}


class NativeLog(Protocol):
    def drain_log(self, max_events: int, /) -> list[tuple[int, str, str]]: ...


async def run(core: NativeLog, clock: Clock) -> None:
    """Until cancelled. The native side keeps a bounded number of events, so a pause loses only the oldest."""
    while True:
        relay(core)
        await clock.sleep(INTERVAL_S)


def relay(core: NativeLog) -> int:
    """Write what is there now; returns the number of lines."""
    events = core.drain_log(_BATCH)
    for level, event, message in events:
        _WRITE.get(level, log.info)(Event.NODE_DATA_PLANE, what=event, message=message)
    return len(events)
