"""GET /console/configuration: every setting as this gateway reads it, with its source; for operators."""

from __future__ import annotations

import msgspec

from mooncache.config import explain
from mooncache.gateway.shell.exchange import Exchange
from mooncache.gateway.state import GatewayState


async def handle(state: GatewayState, exchange: Exchange) -> None:
    """Raises Unauthenticated, PermissionDenied."""
    state.require_console().left_s(exchange)
    rows = [
        {
            "name": row.name,
            "value": row.value,
            "source": row.source,
            "default": row.default,
            "set": not row.is_default,
            "help": row.help,
            "audience": row.audience,
        }
        for row in explain(state.config)
    ]
    document = {"at_s": state.clock.wall_s(), "gateway": state.gateway_id, "settings": rows}
    await exchange.reply(200, msgspec.json.encode(document))
