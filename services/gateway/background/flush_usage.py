"""Writes what tenants used to the file of this host. A gateway that is killed loses what it counted since then."""

from __future__ import annotations

from mooncache.gateway.state import GatewayState


async def run(state: GatewayState) -> None:
    """One look. Raises ConfigInvalid when the file cannot be written; counts stay in memory, and requests go on."""
    if state.meter is not None:
        await state.meter.flush()
