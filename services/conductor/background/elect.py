"""Duty: be elected by etcd or a Lease, where `conductor.election` says so. `lead` does what follows from it.

The leadership ends here when it ends there, by the clock of this process; a newer term that was heard of ends it, too,
and the next campaign is for a term above that.
"""

from __future__ import annotations

from typing import Final

from mooncache.conductor.state import ConductorState
from mooncache.coordination import Coordinator, Leadership
from mooncache.runtime.logs import Event, get_logger
from mooncache.runtime.tasks import wait_for_event

LOOK_S: Final = 0.1

log = get_logger(__name__)


async def run(state: ConductorState, coordinator: Coordinator) -> None:
    """Until this process ends."""
    book = state.leadership
    while not book.has_retired():
        if not book.may_campaign(state.clock.now_s()):
            await state.clock.sleep(LOOK_S)
            continue
        leadership = await coordinator.campaign(book.newest)
        try:
            book.grant = leadership
            await _while_it_holds(state, leadership)
        finally:
            book.grant = None
            if book.leads:
                reason = leadership.reason or f"term {book.newest} is newer"
                log.warning(Event.ELECTION_LOST, term=leadership.term, reason=reason)
                book.seek(state.clock.now_s())
                state.announce_leader()
        if not leadership.lost.is_set():
            await coordinator.resign()


async def _while_it_holds(state: ConductorState, leadership: Leadership) -> None:
    book = state.leadership
    while leadership.holds(state.clock.now_s()) and leadership.term >= book.newest and not book.has_retired():
        await wait_for_event(leadership.lost, LOOK_S)
