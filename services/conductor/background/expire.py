"""Duty: notice instances that went silent, and requests whose end is not reported.

When this process was stopped for a while, it looks before the reports that wait for it are read. Time in which nothing
was read is no silence of instances; otherwise all of them would be suspect at once, and requests refused.
"""

from __future__ import annotations

from mooncache.conductor.config import EXPIRE_INTERVAL_S
from mooncache.conductor.state import ConductorState
from mooncache.runtime.logs import Event, get_logger

log = get_logger(__name__)


async def run_once(state: ConductorState) -> None:
    """Look once."""
    now_s = state.clock.now_s()
    late_s = now_s - state.looked_s - EXPIRE_INTERVAL_S
    state.looked_s = now_s
    if late_s > EXPIRE_INTERVAL_S:
        state.core.registry.unheard(late_s, now_s)
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
