"""GET /health: 200 while the gateway serves; how many models it can serve is information, not a condition."""

from __future__ import annotations

import msgspec

from mooncache.gateway.shell.exchange import Exchange
from mooncache.gateway.state import GatewayState


async def handle(state: GatewayState, exchange: Exchange) -> None:
    served = sum(bool(model.instances) for model in state.fleet.models.values())
    status = "draining" if state.draining else "ok"
    body = {"status": status, "models": served, "conductor": state.conductor.present}
    await exchange.reply(503 if state.draining else 200, msgspec.json.encode(body))
