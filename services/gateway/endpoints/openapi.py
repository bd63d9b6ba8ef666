"""GET /openapi.json."""

from __future__ import annotations

import msgspec

from mooncache.gateway.core.openapi import document
from mooncache.gateway.shell.exchange import Exchange
from mooncache.gateway.state import GatewayState


async def handle(state: GatewayState, exchange: Exchange) -> None:
    await exchange.reply(200, msgspec.json.encode(document(state.config.gateway.choice_count_max)))
