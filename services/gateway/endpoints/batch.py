"""GET /v1/batches/{id}, and POST /v1/batches/{id}/cancel: one batch, as it is now."""

from __future__ import annotations

import asyncio

import msgspec

from mooncache.errors import InvalidArgument
from mooncache.gateway.core import faults
from mooncache.gateway.core.batch import BatchStatus, OfflineBatch
from mooncache.gateway.shell.exchange import Exchange
from mooncache.gateway.state import GatewayState


async def handle(state: GatewayState, exchange: Exchange) -> None:
    """Raises NotFound, also for another tenant's; Refusal."""
    await exchange.reply(200, msgspec.json.encode(_asked(state, exchange).described()))


async def handle_cancel(state: GatewayState, exchange: Exchange) -> None:
    """Raises NotFound, also for another tenant's; Refusal when it has ended."""
    batch, store = _asked(state, exchange), state.require_batches()
    if batch.status in (BatchStatus.VALIDATING, BatchStatus.IN_PROGRESS):
        batch.move(BatchStatus.CANCELLING, state.clock.wall_s())
        await asyncio.to_thread(store.save, batch)
        store.changed.set()
    elif batch.status not in (BatchStatus.CANCELLING, BatchStatus.CANCELLED):
        text = f"Cannot cancel a batch with status {batch.status.value!r}."
        raise faults.refuse(InvalidArgument(text), status=409, code="batch_not_cancellable")
    await exchange.reply(200, msgspec.json.encode(batch.described()))


def _asked(state: GatewayState, exchange: Exchange) -> OfflineBatch:
    tenant = exchange.require_caller().tenant
    return state.require_batches().batch(tenant, exchange.scope["path_params"]["batch_id"])
