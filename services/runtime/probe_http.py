"""The small HTTP port of every service: GET /metrics, /health, /ready, /serving. Nothing else, and nothing can be
changed by it.

/health says that the process's loop turns, /ready whether it should get work (503 and the reason otherwise), /serving
whether the cluster gives it work: as gRPC's health of its control service, so also registered where it registers.
On loopback the port is open to local users and speaks plain HTTP; beyond loopback it speaks HTTPS when TLS is on, and
/metrics asks for the metrics key (`mooncache token --metrics`), which opens nothing else. The probes, which tell one
sentence, stay open for orchestrators. Requests are hostile: size, time and number of
connections are capped.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import json
import ssl
from collections.abc import Callable, Sequence
from typing import Final

from mooncache.errors import ConfigInvalid
from mooncache.runtime.bind import is_loopback
from mooncache.runtime.metrics import Metrics

REQUEST_BYTES_MAX: Final = 8192
REQUEST_TIMEOUT_S: Final = 5.0
CONNECTION_COUNT_MAX: Final = 64
_REASONS: Final = {
    200: "OK",
    400: "Bad Request",
    401: "Unauthorized",
    404: "Not Found",
    405: "Method Not Allowed",
    503: "Service Unavailable",
}
Answer = tuple[int, str, bytes]


class ProbeServer:
    """Serves the paths. `readiness` and `serving` return "" for yes, otherwise the reason; each of `keys` opens
    /metrics."""

    def __init__(
        self,
        metrics: Metrics,
        readiness: Callable[[], str],
        serving: Callable[[], str],
        keys: Callable[[], Sequence[str]],
    ) -> None:
        self._metrics = metrics
        self._asked = {"/ready": ("ready", readiness), "/serving": ("serving", serving)}
        self._keys = keys
        self._open = False
        self._server: asyncio.Server | None = None
        self._connection_count = 0
        self.port = 0

    async def start(self, host: str, port: int, tls: ssl.SSLContext | None = None) -> None:
        """Listen; `tls` counts beyond loopback. Raises ConfigInvalid when the address cannot be had."""
        self._open = is_loopback(host)
        try:
            self._server = await asyncio.start_server(
                self._connection, host, port, limit=REQUEST_BYTES_MAX, ssl=None if self._open else tls
            )
        except OSError as error:
            raise ConfigInvalid(
                f"The metrics port {host}:{port} cannot be opened: {error.strerror}."
            ) from None
        self.port = self._server.sockets[0].getsockname()[1]

    async def stop(self) -> None:
        """Close the port."""
        if self._server is not None:
            self._server.close()
            self._server = None

    async def _connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._connection_count += 1
        try:
            if self._connection_count <= CONNECTION_COUNT_MAX:
                async with asyncio.timeout(REQUEST_TIMEOUT_S):
                    await self._exchange(reader, writer)
        except (TimeoutError, OSError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
            pass  # a slow, broken or oversized request gets no answer
        finally:
            self._connection_count -= 1
            writer.close()
            with contextlib.suppress(OSError):
                await writer.wait_closed()

    async def _exchange(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
        status, content_type, body = self.answer(head)
        writer.write(
            (
                f"HTTP/1.1 {status} {_REASONS[status]}\r\nContent-Type: {content_type}\r\n"
                f"Content-Length: {len(body)}\r\nConnection: close\r\n\r\n"
            ).encode("latin-1")
            + (b"" if head.startswith("HEAD ") else body)
        )
        await writer.drain()

    def answer(self, head: str) -> Answer:
        """Status, content type and body for a request's head."""
        lines = head.split("\r\n")
        words = lines[0].split(" ")
        if len(words) != 3 or not words[2].startswith("HTTP/1."):
            return _text(400, "bad request")
        method, path = words[0], words[1].split("?")[0]
        if method not in ("GET", "HEAD"):
            return _text(405, "only GET")
        if path == "/health":
            return _text(200, "ok")
        if path in self._asked:
            word, ask = self._asked[path]
            reason = ask()
            return 503 if reason else 200, "application/json", _json({word: not reason, "reason": reason})
        if path == "/metrics":
            return self._metrics_answer(lines[1:])
        return _text(404, "paths: /metrics /health /ready /serving")

    def _metrics_answer(self, header_lines: list[str]) -> Answer:
        pairs = (line.partition(":") for line in header_lines)
        headers = {name.strip().lower(): value.strip() for name, _, value in pairs}
        if not self._open:
            presented = headers.get("authorization", "").encode()
            fits = [hmac.compare_digest(presented, f"Bearer {key}".encode()) for key in self._keys()]
            if not any(fits):
                return _text(401, "send the key of `mooncache token --metrics` as Authorization: Bearer")
        page, content_type = self._metrics.page_for(headers.get("accept", ""))
        return 200, content_type, page


def _text(status: int, text: str) -> Answer:
    return status, "text/plain; charset=utf-8", text.encode() + b"\n"


def _json(value: object) -> bytes:
    return json.dumps(value).encode() + b"\n"
