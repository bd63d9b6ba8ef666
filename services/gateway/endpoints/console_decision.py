"""GET /console/decision?id=...&policy=...: the record of one decision, which `mooncache why` shows in a terminal."""

from __future__ import annotations

from typing import Final
from urllib.parse import parse_qs

from mooncache.errors import DecisionUnknown, LimitExceeded
from mooncache.gateway.console.console import QUESTIONS_MAX
from mooncache.gateway.core import faults
from mooncache.gateway.shell.exchange import Exchange
from mooncache.gateway.state import GatewayState

_QUERY_CHARS_MAX: Final = 1024
_NAME_CHARS_MAX: Final = 256


async def handle(state: GatewayState, exchange: Exchange) -> None:
    """Raises Refusal: no such decision is kept; LimitExceeded; what a silent conductor raises."""
    console = state.require_console()
    console.left_s(exchange)
    query = parse_qs(exchange.scope.get("query_string", b"")[:_QUERY_CHARS_MAX].decode("latin-1"))
    name, policy = (query.get(field, [""])[0][:_NAME_CHARS_MAX] for field in ("id", "policy"))
    if console.questions >= QUESTIONS_MAX:
        raise LimitExceeded("Too many records are asked for at this moment; try again.")
    console.questions += 1
    try:
        record = await console.collector.decision(name, policy)
    except DecisionUnknown as error:
        raise faults.refuse(error, status=404, code="decision_unknown") from None
    finally:
        console.questions -= 1
    await exchange.reply(200, record.encode())
