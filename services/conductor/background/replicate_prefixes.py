"""Duty: give prefixes that many read more copies in the pool, within the budget of bytes."""

from __future__ import annotations

from mooncache.conductor.core.hot_prefixes import Speed
from mooncache.conductor.core.learning import TransferLearner
from mooncache.conductor.state import ConductorState
from mooncache.errors import MooncacheError
from mooncache.logs import Event, get_logger

log = get_logger(__name__)


async def run_once(state: ConductorState) -> None:
    """Plan once and give the orders to the master. An order that fails is planned again."""
    if state.copies is None or not state.section.replicate_bytes_per_s or not state.pool.connected:
        return
    orders = state.hot.plan(speeds(state), state.pool.node_count, state.clock.now_s())
    for at, order in enumerate(orders):
        try:
            task_id = await state.copies.order(order.keys, order.copies)
        except MooncacheError as error:
            for left in orders[at:]:  # those behind it are not given either
                state.hot.failed(left)
            state.instruments.copy_orders.labels(error.name).inc()
            log.warning(Event.PREFIX_NOT_REPLICATED, code=error.name, reason=error.message)
            return
        state.instruments.copy_orders.labels("ok").inc()
        state.instruments.copied_bytes.inc(order.size_bytes)
        log.info(
            Event.PREFIX_REPLICATED,
            model=order.model,
            copies=order.copies,
            blocks=len(order.keys) // 32,
            size_bytes=order.size_bytes,
            task_id=task_id,
        )


def speeds(state: ConductorState) -> dict[str, Speed]:
    """What readers of each model's blocks load, as observed; models of unknown size are left out."""
    found: dict[str, Speed] = {}
    for instance in state.core.registry:
        info = instance.info
        if info.model in found or not info.kv_bytes_per_token or not info.pool:
            continue
        learner = state.core.models.of(info.model).transfers.get("") or TransferLearner()
        rate = learner.cost(info.kv_bytes_per_token).tokens_per_s
        found[info.model] = Speed(rate, info.kv_bytes_per_token, info.block_tokens)
    return found
