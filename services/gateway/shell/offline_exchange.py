"""One request of a batch on the way that all requests go: its body comes from a file, its answer goes into memory."""

from __future__ import annotations

import asyncio
from collections.abc import MutableMapping
from typing import Any

from mooncache.gateway.core.rate_limit import RateLimits
from mooncache.gateway.shell.exchange import Exchange
from mooncache.gateway.shell.keyring import Caller


class OfflineExchange(Exchange):
    """An exchange without a client. It has no limit but money: the conductor says when it may be sent.

    budget, key_budget: money in a month of the tenant and of the key; 0: no limit. priority: what was set for them.

    Attributes: `admitted` is set once it is; `freed` is set by the first token and by the end of any one; `content` is
    the answer's body so far.
    """

    def __init__(
        self,
        path: str,
        body: bytes,
        *,
        tenant: str,
        admin: bool,
        key_id: str,
        request_id: str,
        started_s: float,
        freed: asyncio.Event,
        budget: float = 0,
        key_budget: float = 0,
        priority: int = 0,
    ) -> None:
        scope = {"method": "POST", "path": path, "headers": []}
        super().__init__(
            scope, self._give_body, self._take_answer, request_id=request_id, started_s=started_s
        )
        self.caller = Caller(
            tenant,
            admin,
            RateLimits(money_per_month=budget),
            key_id,
            key_limits=RateLimits(money_per_month=key_budget),
            priority=priority,
        )
        self.offline = True
        self.admitted = asyncio.Event()
        self.freed = freed
        self.content = bytearray()
        self._body: bytes | None = body

    async def _give_body(self) -> MutableMapping[str, Any]:
        body, self._body = self._body, None
        if body is None:
            await asyncio.Event().wait()  # it never leaves; whoever awaits this is cancelled with the request
        return {"type": "http.request", "body": body, "more_body": False}

    async def _take_answer(self, message: MutableMapping[str, Any]) -> None:
        if message["type"] == "http.response.start":
            self.freed.set()  # its prompt is computed
        self.content += message.get("body", b"")
