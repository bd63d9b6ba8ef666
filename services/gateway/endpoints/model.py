"""GET /v1/models/{id}: one model; ids may have slashes."""

from __future__ import annotations

import msgspec

from mooncache.gateway.core import faults
from mooncache.gateway.endpoints.models import describe
from mooncache.gateway.shell.exchange import Exchange
from mooncache.gateway.state import GatewayState


async def handle(state: GatewayState, exchange: Exchange) -> None:
    name = exchange.scope["path_params"]["model"].rstrip("/")
    model = state.fleet.models.get(name)
    if model is None or not model.instances:
        raise faults.unknown_model(name)
    await exchange.reply(200, msgspec.json.encode(describe(state.fleet, model)))
