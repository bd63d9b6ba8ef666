"""/v1/batches: POST begins a batch, GET lists a tenant's batches, the newest first."""

from __future__ import annotations

import asyncio
from typing import Final, Literal

import msgspec

from mooncache.errors import InvalidArgument
from mooncache.gateway.core import faults
from mooncache.gateway.core.batch import ENDPOINTS, WINDOW_S, OfflineBatch, Purpose
from mooncache.gateway.core.page import page_of, query_of
from mooncache.gateway.shell.batch_store import new_id
from mooncache.gateway.shell.exchange import SILENCE_MAX_S, Exchange
from mooncache.gateway.state import GatewayState

_BODY_BYTES_MAX: Final = 64 << 10
_METADATA_MAX: Final = 16
_METADATA_CHARS_MAX: Final = 512
_PAGE_MAX: Final = 100
_PAGE: Final = 20


class _WantedBatch(msgspec.Struct):
    input_file_id: str
    endpoint: str
    completion_window: Literal["24h"]
    metadata: dict[str, str] | None = None


async def handle(state: GatewayState, exchange: Exchange) -> None:
    """Raises Refusal, NotFound."""
    store = state.require_batches()
    if exchange.method == "POST":
        batch = await _begun(state, exchange)
        await exchange.reply(200, msgspec.json.encode(batch.described()))
        return
    tenant = exchange.require_caller().tenant
    mine = [each for each in store.batches.values() if each.tenant == tenant]
    mine.sort(key=lambda each: (each.created_at, each.id), reverse=True)
    page = page_of(mine, query_of(exchange.scope), most=_PAGE_MAX, usual=_PAGE)
    await exchange.reply(200, msgspec.json.encode(page))


async def _begun(state: GatewayState, exchange: Exchange) -> OfflineBatch:
    store, caller = state.require_batches(), exchange.require_caller()
    wanted = _read(b"".join(await exchange.read_body(_BODY_BYTES_MAX, SILENCE_MAX_S, SILENCE_MAX_S)))
    found = store.file(caller.tenant, wanted.input_file_id)
    if found.purpose is not Purpose.BATCH:
        raise faults.bad_request("The file's purpose is not `batch`.", "input_file_id")
    count = sum(each.tenant == caller.tenant for each in store.batches.values())
    if count >= state.config.gateway.tenant_batch_file_count_max:
        error = InvalidArgument(f"You have {count} batches, which is the limit until old ones are deleted.")
        raise faults.refuse(error, code="batch_limit_exceeded")
    now_s = int(state.clock.wall_s())
    batch = OfflineBatch(
        id=new_id("batch_"),
        tenant=caller.tenant,
        admin=caller.admin,
        key_id=caller.key_id,
        endpoint=wanted.endpoint,
        input_file_id=found.id,
        metadata=wanted.metadata,
        created_at=now_s,
        expires_at=now_s + WINDOW_S,
    )
    await asyncio.to_thread(store.save, batch)
    store.changed.set()
    return batch


def _read(data: bytes) -> _WantedBatch:
    """What is wanted, checked. Raises Refusal."""
    try:
        wanted = msgspec.json.decode(data, type=_WantedBatch)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise faults.bad_request(f"This is no batch: {error}.") from None
    if wanted.endpoint not in ENDPOINTS:
        raise faults.bad_request(f"`endpoint` has to be one of {', '.join(ENDPOINTS)}.", "endpoint")
    pairs = (wanted.metadata or {}).items()
    if len(pairs) > _METADATA_MAX or any(
        len(name) > _METADATA_CHARS_MAX or len(value) > _METADATA_CHARS_MAX for name, value in pairs
    ):
        text = f"`metadata` has at most {_METADATA_MAX} pairs of at most {_METADATA_CHARS_MAX} characters."
        raise faults.bad_request(text, "metadata")
    return wanted
