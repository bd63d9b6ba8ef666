"""GET /v1/models: models that at least one instance serves now."""

from __future__ import annotations

import msgspec

from mooncache.gateway.core.fleet import FleetModel, FleetView
from mooncache.gateway.shell.exchange import Exchange
from mooncache.gateway.state import GatewayState


def describe(fleet: FleetView, model: FleetModel) -> dict[str, object]:
    """One model in OpenAI's words, with vLLM's max_model_len."""
    found = {
        "id": model.name,
        "object": "model",
        "created": int(fleet.first_seen_wall_s.get(model.name, 0)),
        "owned_by": "mooncache",
        "root": model.name,
        "parent": None,
    }
    if model.max_model_tokens:
        found["max_model_len"] = model.max_model_tokens
    return found


async def handle(state: GatewayState, exchange: Exchange) -> None:
    fleet = state.fleet
    served = [
        describe(fleet, fleet.models[name]) for name in sorted(fleet.models) if fleet.models[name].instances
    ]
    await exchange.reply(200, msgspec.json.encode({"object": "list", "data": served}))
