"""GET /metrics: Prometheus text. Beyond loopback it needs the cluster token (see app.py)."""

from __future__ import annotations

from mooncache.gateway.shell.exchange import Exchange
from mooncache.gateway.state import GatewayState
from mooncache.runtime.metrics import CONTENT_TYPE


async def handle(state: GatewayState, exchange: Exchange) -> None:
    await exchange.reply(200, state.metrics.render(), CONTENT_TYPE)
