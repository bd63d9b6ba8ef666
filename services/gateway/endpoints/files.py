"""/v1/files: POST takes a file for a batch, GET lists a tenant's files."""

from __future__ import annotations

import asyncio
from typing import IO, Final

import msgspec

from mooncache.errors import InvalidArgument
from mooncache.gateway.core import faults
from mooncache.gateway.core.batch import Purpose, StoredFile
from mooncache.gateway.core.page import page_of, query_of
from mooncache.gateway.shell.batch_store import BatchStore, new_id
from mooncache.gateway.shell.exchange import SILENCE_MAX_S, Exchange
from mooncache.gateway.shell.upload import Upload
from mooncache.gateway.state import GatewayState

FORM_BYTES: Final = 64 << 10  # around a file
PAGE_MAX: Final = 10_000
_EXPIRES: Final = "expires_after[seconds]"
_EXPIRES_LEAST_S: Final = 3600
_DISCARD_BYTES_MAX: Final = 256 << 20
_DISCARD_S: Final = 10.0


async def handle(state: GatewayState, exchange: Exchange) -> None:
    """Raises Refusal."""
    store = state.require_batches()
    if exchange.method == "POST":
        found = await _taken(state, store, exchange)
        await exchange.reply(200, msgspec.json.encode(found.described()))
        return
    query = query_of(exchange.scope)
    tenant = exchange.require_caller().tenant
    mine = [each for each in store.files.values() if each.tenant == tenant]
    if query.get("purpose"):
        mine = [each for each in mine if each.purpose == query["purpose"]]
    mine.sort(key=lambda each: (each.created_at, each.id), reverse=query.get("order") != "asc")
    page = page_of(mine, query, most=PAGE_MAX, usual=PAGE_MAX)
    await exchange.reply(200, msgspec.json.encode(page))


async def _taken(state: GatewayState, store: BatchStore, exchange: Exchange) -> StoredFile:
    settings, tenant = state.config.gateway, exchange.require_caller().tenant
    count = sum(each.tenant == tenant for each in store.files.values())
    if count >= settings.tenant_batch_file_count_max:
        raise _full(f"You have {count} files, which is the limit.")
    left_bytes = settings.tenant_batch_bytes_max - store.tenant_bytes(tenant)
    if left_bytes <= 0:
        raise _full(f"Your files have {settings.tenant_batch_bytes_max} bytes together, which is the limit.")
    written = store.begin()
    try:
        upload = Upload(exchange.headers.get("content-type", ""), written)
        limit = min(settings.batch_file_bytes_max, left_bytes) + FORM_BYTES
        async for part in exchange.body_parts(limit, SILENCE_MAX_S, settings.request_timeout_s):
            await asyncio.to_thread(upload.write, part)
        upload.close()
        found = _file_of(upload, tenant, state)
        await asyncio.shield(asyncio.to_thread(_keep, store, written, found, limit - FORM_BYTES))
    except BaseException as error:
        await asyncio.to_thread(store.drop, written)
        if isinstance(error, faults.Refusal) and exchange.unread:
            await exchange.discard_body(_DISCARD_BYTES_MAX, _DISCARD_S)
        raise
    return found


def _keep(store: BatchStore, written: IO[bytes], found: StoredFile, limit: int) -> None:
    if not written.tell():
        raise faults.bad_request("The file is empty.", "file")
    if written.tell() > limit:
        raise _full(f"The file has {written.tell()} bytes; {limit} can be taken.")
    store.keep(written, found)


def _file_of(upload: Upload, tenant: str, state: GatewayState) -> StoredFile:
    purpose = upload.fields.get("purpose", "")
    if purpose != Purpose.BATCH:
        raise faults.bad_request(
            f"`purpose` is {purpose[:64]!r}; this gateway takes files for `batch`.", "purpose"
        )
    lasts_s = int(state.config.gateway.batch_age_max_s)
    asked = upload.fields.get(_EXPIRES)
    if asked is not None:
        if not asked.isascii() or not asked.isdigit() or len(asked) > 9:
            raise faults.bad_request("`expires_after[seconds]` has to be a number.", "expires_after")
        lasts_s = min(lasts_s, max(_EXPIRES_LEAST_S, int(asked)))
    now_s = int(state.clock.wall_s())
    return StoredFile(
        id=new_id("file-"),
        tenant=tenant,
        size_bytes=0,
        created_at=now_s,
        expires_at=now_s + lasts_s,
        filename=upload.filename or "",
        purpose=Purpose.BATCH,
    )


def _full(text: str) -> faults.Refusal:
    return faults.refuse(
        InvalidArgument(f"{text} Delete files that you no longer need."), code="storage_limit_exceeded"
    )
