"""Duty: measure how many instances each model needs, where KEDA may ask for it."""

from __future__ import annotations

from mooncache.conductor.core.scaling import WorkTotals
from mooncache.conductor.state import ConductorState


async def run_once(state: ConductorState) -> None:
    """Look at each model once."""
    if not state.section.scaler_enabled:
        return
    now_s = state.clock.now_s()
    served = {instance.info.model for instance in state.core.registry}
    state.needs.forget(served)
    for name in sorted(served):
        model = state.core.models.known(name)
        if model is not None:
            book = model.book
            totals = WorkTotals(model.offered_load.total_s, book.arrived_s, book.inline_s, book.generating_s)
            state.needs.look(name, book.view(now_s), totals, now_s)
