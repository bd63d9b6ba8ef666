"""POST /console/act: an operator drains an instance or a node, changes a role, or copies, pins or evicts a hot prefix.

Only the console's own page and programs with the cluster token can ask: the cookie is not sent from other sites, the
browser says where a request comes from, and JSON from elsewhere needs a permission that is never given.
"""

from __future__ import annotations

from typing import Final

import msgspec

from mooncache.gateway.console.console import Console
from mooncache.gateway.core import console_acts
from mooncache.gateway.endpoints.console_session import require_json, require_own_page
from mooncache.gateway.shell.exchange import Exchange
from mooncache.gateway.state import GatewayState

_BODY_S: Final = 10.0


async def handle(state: GatewayState, exchange: Exchange) -> None:
    """Raises Unauthenticated, PermissionDenied, InvalidArgument, LimitExceeded, and what conductor or master raise."""
    console = state.require_console()
    who = who_acts(console, exchange)
    body = await read_question(exchange, console_acts.BODY_BYTES_MAX)
    found = await console.acts.do(console_acts.parse(body), who)
    await exchange.reply(200, msgspec.json.encode({"done": True, **found._asdict()}))


def who_acts(console: Console, exchange: Exchange) -> str:
    """Check that the console's own page, or a program, asks for an act, and that it may; who it is in the audit log.

    Raises Unauthenticated, PermissionDenied.
    """
    require_own_page(exchange)
    return f"{console.operator(exchange)} at {_address(exchange)}"


async def read_question(exchange: Exchange, bytes_max: int) -> bytes:
    """The JSON of an act. Raises Refusal."""
    require_json(exchange)
    return b"".join(await exchange.read_body(bytes_max, _BODY_S))


def _address(exchange: Exchange) -> str:
    client = exchange.scope.get("client")
    return str(client[0]) if client else "an unknown address"
