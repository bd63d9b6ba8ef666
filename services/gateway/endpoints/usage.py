"""GET /v1/usage?since=&until=&by=: what the key's own tenant has used, as gateways of this host metered it."""

from __future__ import annotations

from typing import Final
from urllib.parse import parse_qs

import msgspec

from mooncache.accounts.core.usage import HOUR_S, UsageField
from mooncache.errors import InvalidArgument
from mooncache.gateway.core import faults
from mooncache.gateway.shell.exchange import Exchange
from mooncache.gateway.state import GatewayState

DAYS: Final = 30
_QUERY_CHARS_MAX: Final = 1024
_FIELDS: Final = {
    "hour": UsageField.HOUR,
    "key": UsageField.KEY,
    "model": UsageField.MODEL,
    "class": UsageField.CLASS,
}


async def handle(state: GatewayState, exchange: Exchange) -> None:
    """Raises Refusal for a query that cannot be understood, LimitExceeded, ConfigInvalid."""
    query = parse_qs(exchange.scope.get("query_string", b"")[:_QUERY_CHARS_MAX].decode("latin-1"), True)
    now_s = int(state.clock.wall_s())
    since_s, until_s = (
        _moment(query, "since", now_s - DAYS * 86_400),
        _moment(query, "until", now_s + HOUR_S),
    )
    by = [_field(word) for word in query.get("by", ["model"])[0].split(",")]
    # Whose it is follows from the key alone: the query has no say in it.
    tenant = exchange.require_caller().tenant
    rows = await state.usage.read(tuple(dict.fromkeys(by)), tenant, since_s=since_s, until_s=until_s)
    document = {
        "object": "usage",
        "tenant": tenant,
        "since": since_s,
        "until": until_s,
        "currency": state.usage.book.cost.currency if state.usage.book is not None else None,
        "data": rows,
    }
    await exchange.reply(200, msgspec.json.encode(document))


def _moment(query: dict[str, list[str]], name: str, default: int) -> int:
    if name not in query:
        return default // HOUR_S * HOUR_S
    text = query[name][0]
    if not (text.isascii() and text.isdigit() and len(text) <= 12):
        raise faults.refuse(InvalidArgument(f"{name} is a Unix time in seconds."), code="invalid_query")
    return int(text) // HOUR_S * HOUR_S


def _field(word: str) -> UsageField:
    if word not in _FIELDS:
        error = InvalidArgument(f"by is one or more of {', '.join(_FIELDS)}, separated by commas.")
        raise faults.refuse(error, code="invalid_query")
    return _FIELDS[word]
