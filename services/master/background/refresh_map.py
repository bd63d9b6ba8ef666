"""Duty: publish moved free bytes and weights, many movements in one new map."""

from __future__ import annotations

from mooncache.master.state import MasterState


async def run_once(state: MasterState) -> None:
    """Publish when due."""
    if state.membership.refresh(state.clock.now_s()):
        state.announce()
