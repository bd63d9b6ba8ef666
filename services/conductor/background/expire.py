"""Duty: notice instances that went silent, and requests whose end is not reported."""

from __future__ import annotations

from mooncache.conductor.state import ConductorState
from mooncache.runtime.logs import Event, get_logger

log = get_logger(__name__)


async def run_once(state: ConductorState) -> None:
    """Look once."""
    now_s = state.clock.now_s()
    before = {instance.info.instance_id: instance.state for instance in state.core.registry}
    gone, stale = state.core.expire(now_s)
    for instance in gone:
        state.instruments.forgotten.inc()
        log.warning(Event.INSTANCE_FORGOTTEN, instance_id=instance.info.instance_id)
    for instance in state.core.registry:
        name = instance.info.instance_id
        if before.get(name) != instance.state:
            log.info(
                Event.INSTANCE_STATE_CHANGED, instance_id=name, before=before.get(name), after=instance.state
            )
    state.instruments.expired.inc(len(stale))
    state.announce()
    state.give_up()
