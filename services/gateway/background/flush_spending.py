"""Writes what tenants and keys spent to the file of this host, and says which budgets are nearly or wholly spent.

A gateway that is killed loses what it counted since the last look, a second.
"""

from __future__ import annotations

from mooncache.gateway.core.holders import split_holder
from mooncache.gateway.core.spending import WARN_SHARE
from mooncache.gateway.state import GatewayState
from mooncache.runtime.logs import Event, get_logger

log = get_logger(__name__)


async def run(state: GatewayState) -> None:
    """One look. Raises ConfigInvalid when the file cannot be written; sums stay in memory, and requests go on."""
    if state.spending is None:
        if state.keyring.budgets and not state.unpriced_noted:
            state.unpriced_noted = True
            log.warning(Event.BUDGET_UNPRICED, count=len(state.keyring.budgets))
        return
    _warn(state, state.spending.currency)
    await state.spending.flush()


def _warn(state: GatewayState, currency: str) -> None:
    spending, near, spent = state.limiter.spending, 0, 0
    for holder, budget in state.keyring.budgets.items():
        total = spending.total(holder)
        near, spent = near + (total >= WARN_SHARE * budget), spent + (total >= budget)
        share = spending.passed(holder, budget)
        if share is None:
            continue
        tenant, key_id = split_holder(holder)
        log.warning(
            Event.BUDGET_NEAR if share < 1 else Event.BUDGET_SPENT,
            tenant=tenant,
            key_id=key_id,
            month=spending.month,
            spent=round(total, 6),
            budget=budget,
            currency=currency,
        )
    state.stats.budgets_near.set(near)
    state.stats.budgets_spent.set(spent)
