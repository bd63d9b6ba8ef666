"""Room for what a request has under way: its tokens and its money count against limits of its tenant and its key.

How large a request is, is known only when its body has been read. A prompt counts with all its tokens, the answer with
all that may be generated: `max_tokens` for each choice, or what the model's context leaves. Money is what that costs at
most; what it did cost takes its place at the end.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import NoReturn

from mooncache.accounts.months import next_month_s
from mooncache.errors import BudgetSpent, LimitExceeded, Overloaded
from mooncache.gateway.core import faults
from mooncache.gateway.core.holders import of_key
from mooncache.gateway.core.rate_limit import RateLimit, RateLimits
from mooncache.gateway.shell.exchange import Exchange
from mooncache.gateway.state import GatewayState


@dataclass(frozen=True, slots=True)
class RequestSize:
    """The most that a request may take: tokens of prompt and answer, and money (None: no price book)."""

    tokens: int
    money: float | None


@contextlib.asynccontextmanager
async def held(state: GatewayState, exchange: Exchange, size: RequestSize) -> AsyncIterator[None]:
    """Have room for a request meanwhile; the holder of the cluster token needs none. Raises LimitExceeded, Refusal."""
    caller = exchange.require_caller()
    with contextlib.ExitStack() as stack:
        for holder, limits in [] if caller.admin else caller.holders:
            for kind, most, amount in _amounts(limits, size, offline=exchange.offline):
                await state.limit_turns.wait(state.limiter, holder, {kind: most}, state.clock)
                if not state.limiter.hold(holder, kind, most, amount, state.clock.now_s()):
                    state.stats.rate_limited.labels(kind).inc()
                    _refuse(state, exchange, holder, kind, most)
                stack.callback(state.limiter.release, holder, kind, amount)
        yield


def _amounts(limits: RateLimits, size: RequestSize, *, offline: bool) -> list[tuple[RateLimit, float, float]]:
    """Kind, limit and amount of each limit that holds. Of batches the conductor says when they may be sent."""
    found: list[tuple[RateLimit, float, float]] = []
    if limits.tokens_under_way and not offline:
        found.append((RateLimit.TOKENS_UNDER_WAY, limits.tokens_under_way, size.tokens))
    if limits.money_per_month and size.money is not None:
        found.append((RateLimit.MONEY, limits.money_per_month, size.money))
    return found


def _refuse(state: GatewayState, exchange: Exchange, holder: str, kind: RateLimit, most: float) -> NoReturn:
    """Raises LimitExceeded, or Refusal with the code budget_spent; for a batch Overloaded, which it waits out."""
    if kind is not RateLimit.MONEY or state.spending is None:
        raise LimitExceeded(state.limiter.no_room(holder, kind, most))
    what = f"The budget of {most:g} {state.spending.currency} a month{of_key(holder)}"
    if state.limiter.spending.total(holder) < most:
        text = f"{what} leaves no room beside your requests under way. Send the next when one has ended."
        raise Overloaded(text) if exchange.offline else LimitExceeded(text)
    wall_s = state.clock.wall_s()
    again_s = next_month_s(wall_s)
    again = datetime.fromtimestamp(again_s, UTC).strftime("%Y-%m-%d %H:%M UTC")
    error = BudgetSpent(f"{what} is spent. It begins anew at {again}.")
    raise faults.refuse(error, retry_after_s=again_s - wall_s)
