"""POST /v1/completions."""

from __future__ import annotations

from mooncache.gateway.endpoints.infer import infer
from mooncache.gateway.shell.exchange import Exchange
from mooncache.gateway.state import GatewayState


async def handle(state: GatewayState, exchange: Exchange) -> None:
    await infer(state, exchange, chat=False)
