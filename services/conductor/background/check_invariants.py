"""Duty: check every invariant while nothing else is going on.

A broken one is logged and counted, never hidden.
"""

from __future__ import annotations

from mooncache.conductor.state import ConductorState
from mooncache.runtime.logs import Event, get_logger

log = get_logger(__name__)


async def run_once(state: ConductorState) -> None:
    """Check once."""
    try:
        state.check()
    except AssertionError as broken:
        state.instruments.broken_invariants.inc()
        log.error(Event.DUTY_FAILED, duty="check_invariants", error=str(broken))
