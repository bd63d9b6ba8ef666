"""Duty: now and then the conductor hears which requests are under way here, and forgets plans that never arrived.

A plan is lost when the conductor made it and its answer did not get here: the connection broke, or nothing led for a
while. No gateway would report its end. The list is sent once a minute, and after a question without an answer once the
plan can no longer come: at most twice `SETTLED_S` later, when another list was about to be sent.
"""

from __future__ import annotations

from typing import Final

from mooncache.gateway.state import GatewayState

EVERY_S: Final = 60.0
AGAIN_S: Final = 5.0
SETTLED_S: Final = 21.0  # beyond the age from which on the conductor closes what is not named


async def run(state: GatewayState) -> None:
    """Until cancelled."""
    conductor = state.conductor
    while True:
        await conductor.unanswered(EVERY_S)
        await state.clock.sleep(SETTLED_S)
        while not await conductor.name_open_requests(state.gateway()):
            await state.clock.sleep(AGAIN_S)
