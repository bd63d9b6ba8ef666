"""Every other path."""

from __future__ import annotations

from mooncache.errors import NotFound
from mooncache.gateway.core import faults
from mooncache.gateway.shell.exchange import Exchange
from mooncache.gateway.state import GatewayState


async def handle(state: GatewayState, exchange: Exchange) -> None:
    text = f"There is nothing at {exchange.path[:256]}; GET /openapi.json lists what is served."
    raise faults.refuse(NotFound(text), code="unknown_url")
