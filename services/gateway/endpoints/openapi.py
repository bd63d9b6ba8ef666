"""GET /openapi.json."""

from __future__ import annotations

import msgspec

from mooncache.gateway.core.body import CHOICES_MAX
from mooncache.gateway.core.openapi import document
from mooncache.gateway.shell.exchange import Exchange
from mooncache.gateway.state import GatewayState
from mooncache.runtime.bind import is_loopback


async def handle(state: GatewayState, exchange: Exchange) -> None:
    settings = state.config.gateway
    found = document(CHOICES_MAX, open_metrics=is_loopback(settings.host), batches=state.batches is not None)
    await exchange.reply(200, msgspec.json.encode(found))
