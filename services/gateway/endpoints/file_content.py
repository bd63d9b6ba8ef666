"""GET /v1/files/{id}/content: the bytes of a file."""

from __future__ import annotations

import asyncio
from typing import Final

from mooncache.gateway.shell.exchange import SILENCE_MAX_S, ClientGone, Exchange
from mooncache.gateway.state import GatewayState

_PIECE_BYTES: Final = 1 << 18
_CONTENT: Final = "application/octet-stream"


async def handle(state: GatewayState, exchange: Exchange) -> None:
    """Raises NotFound, also for another tenant's; ClientGone for one that takes no bytes."""
    store = state.require_batches()
    found = store.file(exchange.require_caller().tenant, exchange.scope["path_params"]["file_id"])
    opened = await asyncio.to_thread(store.pieces, found.id)
    try:
        exchange.reply_headers["content-length"] = str(found.size_bytes)
        await exchange.begin_stream(_CONTENT)
        while exchange.method != "HEAD" and (piece := await asyncio.to_thread(opened.read, _PIECE_BYTES)):
            try:
                async with asyncio.timeout(SILENCE_MAX_S):
                    await exchange.write(piece)
            except TimeoutError:
                raise ClientGone from None
        await exchange.end()
    finally:
        opened.close()
