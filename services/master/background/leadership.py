"""Duty: campaign, lead with an empty directory, stop leading the moment the leadership is over.

A new leader knows nothing: every node registers with it and reports in full, because nodes own the truth. A leader that
lost its leadership drops what it knew before it answers another call.
"""

from __future__ import annotations

from mooncache.coordination import Coordinator
from mooncache.errors import MooncacheError
from mooncache.master.state import MasterState
from mooncache.runtime.logs import Event, get_logger

FOLLOW_INTERVAL_S = 0.5

log = get_logger(__name__)


async def lead(state: MasterState, coordinator: Coordinator) -> None:
    """Wait for leadership, lead until it is over."""
    leadership = await coordinator.campaign()
    if leadership.lost.is_set():
        return
    state.begin_term(leadership.term)
    log.info(Event.ELECTION_WON, master_id=state.master_id, term=leadership.term)
    try:
        await leadership.lost.wait()
    finally:
        state.end_term()
        log.warning(
            Event.ELECTION_LOST, master_id=state.master_id, term=leadership.term, reason=leadership.reason
        )


async def follow(state: MasterState, coordinator: Coordinator) -> None:
    """Learn who leads and who else is there, so that callers can be redirected."""
    try:
        leader = await coordinator.leader()
        masters = await coordinator.masters()
    except MooncacheError:
        return  # the coordinator logs that its backend does not answer
    state.masters = tuple(masters)
    if state.leading:
        return
    known = leader is not None and leader.master_id != state.master_id
    leader_id, target = (leader.master_id, leader.grpc_target) if leader is not None and known else ("", "")
    if (leader_id, target) != (state.leader_id, state.leader_target):
        state.follow(leader_id, target)
        log.info(Event.ELECTION_LEADER_CHANGED, leader=leader_id, target=target)
