"""PUT /console/limits: an operator sets limits of a tenant or of one of its keys; what is not named stays as it is."""

from __future__ import annotations

import msgspec

from mooncache.gateway.core import console_keys
from mooncache.gateway.endpoints.console_act import read_question, who_acts
from mooncache.gateway.shell.exchange import Exchange
from mooncache.gateway.shell.key_changes import take_keys_over
from mooncache.gateway.state import GatewayState


async def handle(state: GatewayState, exchange: Exchange) -> None:
    """Raises Unauthenticated, PermissionDenied, InvalidArgument, NotFound, ConfigInvalid, AccountsUnavailable."""
    console = state.require_console()
    who = who_acts(console, exchange)
    asked = console_keys.parse_limits(await read_question(exchange, console_keys.BODY_BYTES_MAX))
    found = await console.keys.limit(asked, who)
    await take_keys_over(state)
    await exchange.reply(200, msgspec.json.encode(found))
