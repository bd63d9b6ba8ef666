"""POST /console/act: an operator drains an instance or a node, changes a role, or copies, pins or evicts a hot prefix.

Only the console's own page and programs with the cluster token can ask: the cookie is not sent from other sites, the
browser says where a request comes from, and JSON from elsewhere needs a permission that is never given.
"""

from __future__ import annotations

from typing import Final

import msgspec

from mooncache.gateway.core import console_acts
from mooncache.gateway.endpoints.console_session import require_json, require_own_page
from mooncache.gateway.shell.exchange import Exchange
from mooncache.gateway.state import GatewayState

_BODY_S: Final = 10.0


async def handle(state: GatewayState, exchange: Exchange) -> None:
    """Raises Unauthenticated, PermissionDenied, InvalidArgument, LimitExceeded, and what conductor or master raise."""
    console = state.require_console()
    require_own_page(exchange)
    who = console.operator(exchange)
    require_json(exchange)
    body = b"".join(await exchange.read_body(console_acts.BODY_BYTES_MAX, _BODY_S))
    found = await console.acts.do(console_acts.parse(body), f"{who} at {_address(exchange)}")
    await exchange.reply(200, msgspec.json.encode({"done": True, **found._asdict()}))


def _address(exchange: Exchange) -> str:
    client = exchange.scope.get("client")
    return str(client[0]) if client else "an unknown address"
