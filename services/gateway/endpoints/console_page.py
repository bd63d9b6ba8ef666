"""GET /console and /console/static/{name}: the page and its files, which say nothing about the cluster."""

from __future__ import annotations

from mooncache.errors import NotFound
from mooncache.gateway.console.files import PAGE, page_files
from mooncache.gateway.core import faults
from mooncache.gateway.shell.exchange import Exchange
from mooncache.gateway.state import GatewayState


async def handle(state: GatewayState, exchange: Exchange) -> None:
    """Raises Refusal: there is no such file."""
    name = exchange.scope.get("path_params", {}).get("name", PAGE)
    file = page_files().get(name)
    if file is None:
        raise faults.refuse(NotFound("The console has no such file."), code="unknown_url")
    # Kept by browsers, but asked for each time: after an upgrade no page mixes files of two versions.
    headers = [("cache-control", "no-cache"), ("etag", file.tag)]
    if exchange.headers.get("if-none-match", "") == file.tag:
        await exchange.reply(304, b"", file.content_type, headers)
        return
    await exchange.reply(200, file.body, file.content_type, headers)
