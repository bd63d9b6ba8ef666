"""/console/keys: GET lists API keys of tenants, POST makes one and shows it once. DELETE of one revokes it.

Whoever sees the console sees the lists, which have no secrets. To change something takes the cluster token, as for
every act; this gateway has it in force when it answers, others on their next look.
"""

from __future__ import annotations

from typing import Final
from urllib.parse import parse_qs

import msgspec

from mooncache.gateway.core import console_keys
from mooncache.gateway.endpoints.console_act import read_question, who_acts
from mooncache.gateway.shell.exchange import Exchange
from mooncache.gateway.shell.key_changes import take_keys_over
from mooncache.gateway.state import GatewayState

_QUERY_CHARS_MAX: Final = 1024


async def handle(state: GatewayState, exchange: Exchange) -> None:
    """Raises Unauthenticated, PermissionDenied, InvalidArgument, LimitExceeded, ConfigInvalid, AccountsUnavailable."""
    console = state.require_console()
    if exchange.method != "POST":
        console.left_s(exchange)
        query = parse_qs(exchange.scope.get("query_string", b"")[:_QUERY_CHARS_MAX].decode("latin-1"))
        tenant = query.get("tenant", [""])[0]
        if tenant:
            await exchange.reply(200, msgspec.json.encode(await console.keys.of_tenant(tenant)))
        else:
            await exchange.reply(200, msgspec.json.encode({"tenants": await console.keys.tenants()}))
        return
    who = who_acts(console, exchange)
    asked = console_keys.parse_key(await read_question(exchange, console_keys.BODY_BYTES_MAX))
    made = await console.keys.create(asked, who)
    await take_keys_over(state)
    await exchange.reply(200, msgspec.json.encode(made))


async def handle_one(state: GatewayState, exchange: Exchange) -> None:
    """Raises Unauthenticated, PermissionDenied, NotFound, LimitExceeded, ConfigInvalid, AccountsUnavailable."""
    console = state.require_console()
    who = who_acts(console, exchange)
    ended = await console.keys.revoke(exchange.scope["path_params"]["key_id"], who)
    await take_keys_over(state)
    await exchange.reply(200, msgspec.json.encode(ended))
