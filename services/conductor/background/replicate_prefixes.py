"""Duty: give prefixes that many read more copies in the pool, within the budget of bytes, and take them back later."""

from __future__ import annotations

from mooncache.client.keys import KEY_BYTES
from mooncache.conductor.core.hot_prefixes import Order, Speed
from mooncache.conductor.core.learning import TransferLearner
from mooncache.conductor.shell.copies import Copies
from mooncache.conductor.state import ConductorState
from mooncache.errors import MooncacheError
from mooncache.proto.v1 import conductor_pb2 as pb
from mooncache.runtime.logs import Event, get_logger

log = get_logger(__name__)


async def run_once(state: ConductorState) -> None:
    """Plan once and give the orders to the master. An order that fails is planned again."""
    if (
        state.copies is None
        or not state.leads
        or not state.section.replicate_bytes_per_s
        or not state.pool.connected
    ):
        return
    found, now_s = speeds(state), state.clock.now_s()
    await _copy(state, state.copies, state.hot.plan(found, state.pool.node_count, now_s))
    await _trim(state, state.copies, state.hot.plan_removals(found, now_s))


async def _copy(state: ConductorState, copies: Copies, orders: list[Order]) -> None:
    for at, order in enumerate(orders):
        try:
            near = state.pool.nodes_on(order.hosts)
            task_id = await copies.order(
                order.keys, order.copies, near, order.pool_tenant, term=state.leadership.term
            )
        except MooncacheError as error:
            _refused(state, orders[at:], error)
            return
        _note(state, order)
        state.instruments.copied(order.size_bytes)
        log.info(
            Event.PREFIX_REPLICATED,
            model=order.model,
            copies=order.copies,
            blocks=len(order.keys) // KEY_BYTES,
            size_bytes=order.size_bytes,
            near=near,
            task_id=task_id,
        )


async def _trim(state: ConductorState, copies: Copies, orders: list[Order]) -> None:
    for at, order in enumerate(orders):
        try:
            near = state.pool.nodes_on(order.hosts)
            dropped = await copies.trim(
                order.keys, order.copies, near, order.pool_tenant, term=state.leadership.term
            )
        except MooncacheError as error:
            _refused(state, orders[at:], error)
            return
        _note(state, order)
        state.instruments.trimmed(dropped)
        log.info(
            Event.PREFIX_TRIMMED,
            model=order.model,
            copies=order.copies,
            blocks=len(order.keys) // KEY_BYTES,
            dropped=dropped,
        )


def _note(state: ConductorState, order: Order) -> None:
    """Let the standbys know that the order was given."""
    copied = pb.CopiedPrefix(
        keys=state.hot.keys_of(order.name),
        blocks=len(order.keys) // KEY_BYTES // max(1, state.shards_of(order.model)),
        model=order.model,
        copies=order.copies,
        pool_tenant=order.pool_tenant,
    )
    state.note(lambda: pb.JournalEntry(copied=copied))


def _refused(state: ConductorState, orders: list[Order], error: MooncacheError) -> None:
    """The first order was refused; those behind it are not given either."""
    for order in orders:
        state.hot.failed(order)
    kind = "trim" if orders[0].copies < orders[0].before else "copy"
    state.instruments.copy_orders.labels(kind, error.name).inc()
    log.warning(Event.PREFIX_NOT_REPLICATED, kind=kind, code=error.name, reason=error.message)


def speeds(state: ConductorState) -> dict[str, Speed]:
    """What readers of each model's blocks load, as observed; models of unknown size are left out."""
    found: dict[str, Speed] = {}
    for instance in state.core.registry:
        info = instance.info
        if info.model in found or not info.kv_bytes_per_token or not info.pool:
            continue
        model = state.core.models.of(info.model)
        learner = model.transfers.get("") or model.handovers.get("") or TransferLearner()
        rate = learner.cost(info.kv_bytes_per_token).tokens_per_s
        shards = state.shards_of(info.model)
        found[info.model] = Speed(rate, info.kv_bytes_per_token, info.block_tokens, shards)
    return found
