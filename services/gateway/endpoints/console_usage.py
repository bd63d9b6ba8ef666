"""GET /console/usage: what all tenants used, for operators; a tenant's own usage, requests and limits for a tenant."""

from __future__ import annotations

from typing import Any, Final

import msgspec

from mooncache.accounts.core.usage import UsageField, hour_of
from mooncache.gateway.core.console_session import TenantKey
from mooncache.gateway.core.holders import holder_of
from mooncache.gateway.core.rate_limit import RateLimit, RateLimits
from mooncache.gateway.shell.exchange import Exchange
from mooncache.gateway.state import GatewayState

_DAYS: Final = 30
_DAY_S: Final = 86_400


async def handle(state: GatewayState, exchange: Exchange) -> None:
    """Raises Unauthenticated, PermissionDenied, LimitExceeded, ConfigInvalid."""
    key = state.require_console().viewer(exchange)
    wall_s, usage = state.clock.wall_s(), state.usage
    since_s = hour_of(wall_s) - _DAYS * _DAY_S
    document: dict[str, Any] = {
        "at_s": wall_s,
        "days": _DAYS,
        "metered": state.meter is not None,
        "currency": usage.book.cost.currency if usage.book is not None else None,
    }
    if key is None:
        document["rows"] = await usage.read((UsageField.TENANT,), None, since_s=since_s)
    else:
        document |= await _own(state, key, since_s, hour_of(wall_s))
    await exchange.reply(200, msgspec.json.encode(document))


async def _own(state: GatewayState, key: TenantKey, since_s: int, hour_s: int) -> dict[str, Any]:
    """What a tenant may see: nothing here depends on what it asks for."""
    fields = (UsageField.KEY, UsageField.MODEL, UsageField.CLASS)
    limits, of_key = state.keyring.limits_of(key.tenant, key.key_id)
    return {
        "tenant": key.tenant,
        "rows": await state.usage.read(fields, key.tenant, since_s=since_s),
        "hours": await state.usage.read((UsageField.HOUR,), key.tenant, since_s=hour_s - _DAY_S),
        "requests": [each._asdict() for each in state.recent.of(key.tenant)],
        "limits": _limits(state, key.tenant, limits),
        "key_limits": _limits(state, holder_of(key.tenant, key.key_id), of_key),
    }


def _limits(state: GatewayState, holder: str, limits: RateLimits) -> dict[str, Any]:
    """Limits, and what of them is under way at this gateway; 0 is no limit."""
    return {
        "requests_per_minute": limits.requests_per_minute,
        "tokens_per_minute": limits.tokens_per_minute,
        "requests_open": state.tenant_counts.get(holder, 0),
        "requests_open_max": limits.requests_under_way,
        "tokens_open": round(state.limiter.under_way(holder, RateLimit.TOKENS_UNDER_WAY)),
        "tokens_open_max": limits.tokens_under_way,
        "spent": state.limiter.spending.total(holder),
        "money_per_month": limits.money_per_month,
    }
