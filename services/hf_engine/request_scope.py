"""What surrounds one HTTP request of the engine: its id in every log line, and its span until the last byte is sent."""

from __future__ import annotations

import time
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from mooncache.runtime import tracing
from mooncache.runtime.logs import Event, get_logger
from mooncache.runtime.plain_structlog import structlog
from mooncache.runtime.run_op import clean_request_id

log = get_logger(__name__)


class RequestScope:
    """ASGI middleware. Requests that compute nothing (GET: models, health, metrics) pass through."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] != "POST":
            await self._app(scope, receive, send)
            return
        headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
        request_id = clean_request_id(headers.get("x-request-id", ""))
        status, started_s = 0, time.monotonic()

        async def noting(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        fields: dict[str, Any] = {"request_id": request_id, "path": scope["path"]}
        span = tracing.span("engine.request", headers, kind="server")
        with structlog.contextvars.bound_contextvars(**fields), span:
            try:
                await self._app(scope, receive, noting)
            finally:
                span.set(http__status=status)
                if status >= 400:
                    span.fail(str(status))
                elapsed_ms = round((time.monotonic() - started_s) * 1e3, 3)
                log.debug(Event.RPC_FINISHED, code=str(status), elapsed_ms=elapsed_ms)
