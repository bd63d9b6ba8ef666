"""Duty: notice nodes that went silent, and full reports that stopped coming."""

from __future__ import annotations

from mooncache.master.state import MasterState


async def run_once(state: MasterState) -> None:
    """Look once."""
    now_s = state.clock.now_s()
    gone = state.membership.expire(now_s)
    state.apply(gone)
    state.expire_reports(now_s)
    for change in gone:
        if change.contents_lost or change.after is None:
            await state.nodes.forget(change.node_id)
