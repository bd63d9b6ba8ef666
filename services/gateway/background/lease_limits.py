"""Leases this gateway's slices of tenants' limits from the conductor, while there are other gateways.

It asks several times a second, and at once when a request waits for its answer. Without an answer limits become fair
shares after a while (core/tenant_slices.py), which is logged once.
"""

from __future__ import annotations

from typing import Final

from mooncache.errors import MooncacheError
from mooncache.gateway.core.holders import split_holder
from mooncache.gateway.core.limit_shares import LeaseAnswer, ShareUse
from mooncache.gateway.core.rate_limit import RateLimit
from mooncache.gateway.core.tenant_slices import (
    CALL_TIMEOUT_S,
    SHORT_INTERVAL_S,
)
from mooncache.gateway.state import GatewayState
from mooncache.proto.v1 import conductor_pb2 as pb
from mooncache.runtime.logs import Event, get_logger

KINDS: Final = {
    RateLimit.REQUESTS: pb.LIMIT_KIND_REQUESTS,
    RateLimit.TOKENS: pb.LIMIT_KIND_TOKENS,
    RateLimit.CONCURRENCY: pb.LIMIT_KIND_CONCURRENCY,
    RateLimit.TOKENS_UNDER_WAY: pb.LIMIT_KIND_TOKENS_UNDER_WAY,
    RateLimit.MONEY: pb.LIMIT_KIND_MONEY,
}

log = get_logger(__name__)


async def run(state: GatewayState) -> None:
    """Ask until cancelled."""
    while True:
        present, reason = state.conductor.present, ""
        state.limiter.tell_spending(state.keyring.budgets, state.clock.now_s())
        if state.limiter.has_reports():
            state.limit_turns.asked()
            reason = await _ask(state)
            present = not reason
        _note(state, reason, present=present)
        state.limiter.forget_idle(state.clock.now_s())
        await state.clock.sleep(SHORT_INTERVAL_S)
        if not state.limiter.wants_answer or not present:
            await state.limit_turns.wanted(state.limiter.interval_s - SHORT_INTERVAL_S)


async def _ask(state: GatewayState) -> str:
    """Report all that is in use; why the conductor did not take it, "" when it did."""
    limits = state.limiter
    for uses, is_whole in limits.reports(state.clock.now_s()):
        sent_s = state.clock.now_s()
        try:
            answer = await state.conductor.lease_limits(
                [_message(use) for use in uses], CALL_TIMEOUT_S, whole=is_whole
            )
        except MooncacheError as error:
            return error.message or error.name
        leases = [(lease.slice, lease.left) for lease in answer.leases]
        for use, lease in zip(uses, answer.leases, strict=False):
            if use.ledger:
                # A conductor of before says nothing of the ledger.
                own = max(use.spent, lease.spent_own)
                limits.spending.answered(use.tenant, use.month, own, lease.spent_all)
        limits.answered(
            uses, LeaseAnswer(leases, answer.lease_ms / 1e3, answer.run), sent_s, is_whole=is_whole
        )
        state.limit_turns.wake()
    return ""


def _note(state: GatewayState, reason: str, *, present: bool) -> None:
    """Take in whether the conductor answers; log when limits change for that."""
    limits = state.limiter
    if not limits.conductor_is(present, state.clock.now_s()):
        return
    state.limit_turns.wake()
    if limits.falls_back:
        log.warning(Event.LIMITS_DIVIDED, gateways=limits.gateway_count, reason=reason)
    else:
        log.info(Event.LIMITS_SHARED, gateways=limits.gateway_count)


def _message(use: ShareUse) -> pb.LimitUse:
    tenant, key_id = split_holder(use.tenant)
    return pb.LimitUse(
        tenant=tenant,
        key_id=key_id,
        kind=KINDS[use.kind],
        limit=use.limit,
        slice=use.slice,
        used=use.used,
        used_before=use.used_before,
        wanted=use.wanted,
        left=use.left,
        month=use.month,
        ledger=use.ledger,
        spent=use.spent,
        spent_all=use.spent_all,
    )
