"""Duty: read the engine's load from its Prometheus page."""

from __future__ import annotations

from mooncache.runtime.supervision import RunState
from mooncache.worker.core.load import read_page
from mooncache.worker.state import WorkerCounter, WorkerState

INTERVAL_S = 0.5
_TIMEOUT_S = 5.0


async def run(state: WorkerState) -> None:
    """One reading; a page that cannot be had leaves the last load."""
    if state.supervision.state != RunState.READY:
        return
    incarnation = state.incarnation
    text = await state.http.metrics(state.url, min(_TIMEOUT_S, state.config.worker.hang_timeout_s))
    if incarnation != state.incarnation:
        return  # the page of an engine that is gone
    if text is None:
        state.count(WorkerCounter.SCRAPE_FAILURES)
        return
    now_s = state.clock.now_s()
    page = read_page(text, state.meter.names.wanted())
    state.load = state.meter.take(page, now_s)
    state.supervision.progress(now_s, moved=page != state.page or not state.load.running)
    state.page = page
    state.load_s = now_s
