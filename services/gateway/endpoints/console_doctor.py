"""/console/doctor: GET says what the last run of the doctor found, or how far it is; POST begins one.

Every operator may look. A run writes a small block to each node and has the engines read a prompt, so it is for who may
change something.
"""

from __future__ import annotations

from typing import Final

import msgspec

from mooncache.gateway.endpoints.console_session import require_json, require_own_page
from mooncache.gateway.shell.exchange import Exchange
from mooncache.gateway.state import GatewayState

_BODY_BYTES_MAX: Final = 1024  # it says nothing
_BODY_S: Final = 10.0


async def handle(state: GatewayState, exchange: Exchange) -> None:
    """Raises Unauthenticated, PermissionDenied, InvalidArgument."""
    console = state.require_console()
    if exchange.method == "POST":
        require_own_page(exchange)
        console.operator(exchange)
        require_json(exchange)
        await exchange.read_body(_BODY_BYTES_MAX, _BODY_S)
        console.doctor.start(state.config)
    else:
        console.left_s(exchange)
    document = {"at_s": state.clock.wall_s(), "gateway": state.gateway_id, **console.doctor.document()}
    await exchange.reply(200, msgspec.json.encode(document))
