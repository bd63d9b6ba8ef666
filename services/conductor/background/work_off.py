"""Duty: explain misses and remember computed blocks, after the answers have been given."""

from __future__ import annotations

from mooncache.conductor.state import ConductorState


async def run_once(state: ConductorState) -> None:
    """Do what is left to do."""
    await state.work_off()
