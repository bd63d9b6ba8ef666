"""/v1/files/{id}: GET describes a file, DELETE deletes it."""

from __future__ import annotations

import asyncio

import msgspec

from mooncache.errors import InvalidArgument
from mooncache.gateway.core import faults
from mooncache.gateway.shell.exchange import Exchange
from mooncache.gateway.state import GatewayState


async def handle(state: GatewayState, exchange: Exchange) -> None:
    """Raises NotFound, also for another tenant's; Refusal."""
    store = state.require_batches()
    found = store.file(exchange.require_caller().tenant, exchange.scope["path_params"]["file_id"])
    if exchange.method == "DELETE":
        if found.id in store.in_use():
            text = "A batch under way reads this file; cancel the batch, or wait for its end."
            raise faults.refuse(InvalidArgument(text), status=409, code="file_in_use")
        await asyncio.to_thread(store.delete_file, found.id)
        answer = {"id": found.id, "object": "file", "deleted": True}
        await exchange.reply(200, msgspec.json.encode(answer))
        return
    await exchange.reply(200, msgspec.json.encode(found.described()))
