"""POST /v1/embeddings: named so that a client learns why, instead of guessing at its base URL."""

from __future__ import annotations

from mooncache.errors import Unsupported
from mooncache.gateway.core import faults
from mooncache.gateway.shell.exchange import Exchange
from mooncache.gateway.state import GatewayState


async def handle(state: GatewayState, exchange: Exchange) -> None:
    error = Unsupported("This gateway serves chat and text completions; it has no embeddings.")
    raise faults.refuse(error, status=404, code="embeddings_not_served")
