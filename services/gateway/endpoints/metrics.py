"""GET /metrics: Prometheus text, or OpenMetrics for those who accept it.

Beyond loopback it needs the cluster token (see app.py).
"""

from __future__ import annotations

from mooncache.gateway.shell.exchange import Exchange
from mooncache.gateway.state import GatewayState


async def handle(state: GatewayState, exchange: Exchange) -> None:
    page, content_type = state.metrics.page_for(exchange.headers.get("accept", ""))
    await exchange.reply(200, page, content_type)
