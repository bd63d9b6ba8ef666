"""Duty: learn from the master which masters and store nodes there are, for the list of members."""

from __future__ import annotations

from mooncache.client.members import members_of_pool
from mooncache.conductor.member_messages import member_of
from mooncache.conductor.shell.pool_status import PoolStatus
from mooncache.conductor.state import ConductorState
from mooncache.errors import InvalidArgument, MooncacheError


async def run_once(state: ConductorState, pool: PoolStatus) -> None:
    """Ask once. While no master answers, its processes become silent here."""
    try:
        status = await pool.ask()
    except MooncacheError as error:
        state.pool_reason = error.message
        return
    state.pool_reason = ""
    now_s = state.clock.now_s()
    for member, age_s in members_of_pool(status):
        try:
            state.members.heard(member_of(member), now_s - age_s)
        except InvalidArgument:
            continue  # a name that cannot be shown
