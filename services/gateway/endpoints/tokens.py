"""GET /tokens: which cluster tokens this gateway accepts and proves, by fingerprint; needs the cluster token.

What other processes answer on their control port (runtime/ops/get_tokens.py).
"""

from __future__ import annotations

import msgspec

from mooncache.errors import Unsupported
from mooncache.gateway.shell.exchange import Exchange
from mooncache.gateway.state import GatewayState
from mooncache.runtime.ops.get_tokens import answer


async def handle(state: GatewayState, exchange: Exchange) -> None:
    """Raises Unsupported where the gateway is no process of its own."""
    if state.process is None:
        raise Unsupported("This gateway has no token file.")
    found = answer(state.process)
    tokens = [
        {
            "fingerprint": use.fingerprint,
            "used_age_ms": use.used_age_ms if use.HasField("used_age_ms") else None,
        }
        for use in found.tokens
    ]
    await exchange.reply(200, msgspec.json.encode({"tokens": tokens, "problem": found.problem}))
