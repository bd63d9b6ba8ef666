"""What the worker asks an engine over HTTP: health, metrics, models. Every question has a deadline and a size."""

from __future__ import annotations

import contextlib
import ssl
from typing import Final

import aiohttp
import msgspec

from mooncache.worker.core.load import PAGE_BYTES_MAX

_ANSWER_BYTES_MAX: Final = 4 << 20
NOTHING_LISTENS: Final = "nothing listens there"
_ERRORS: Final = (aiohttp.ClientError, TimeoutError, OSError, ValueError)


class EngineHttp:
    """Asks one engine. Nothing here raises for an engine that is silent, broken or talks nonsense."""

    def __init__(self, engine_key: str, tls: ssl.SSLContext | None = None, server_name: str = "") -> None:
        self.use_key(engine_key)
        self._tls = tls
        self._server_name = server_name or None
        self._session: aiohttp.ClientSession | None = None

    def use_key(self, engine_key: str) -> None:
        """Show this one from now on."""
        self._headers = {"Authorization": f"Bearer {engine_key}"}

    async def close(self) -> None:
        """Close the connections."""
        if self._session is not None:
            await self._session.close()
            self._session = None

    async def healthy(self, url: str, timeout_s: float) -> str:
        """Empty when GET /health answers 200, otherwise what it did."""
        try:
            status, _ = await self._get(url + "/health", timeout_s, 1 << 16)
        except aiohttp.ClientConnectorError:
            return NOTHING_LISTENS
        except _ERRORS as error:
            return f"/health: {type(error).__name__}"
        return "" if status == 200 else f"/health answered {status}"

    async def metrics(self, url: str, timeout_s: float) -> str | None:
        """The Prometheus page; None when there is none."""
        with contextlib.suppress(*_ERRORS):
            status, body = await self._get(url + "/metrics", timeout_s, PAGE_BYTES_MAX)
            if status == 200:
                return body.decode("utf-8", "replace")
        return None

    async def json(self, url: str, path: str, timeout_s: float) -> object:
        """The JSON answer of a path; None when there is none."""
        with contextlib.suppress(*_ERRORS):
            status, body = await self._get(url + path, timeout_s, _ANSWER_BYTES_MAX)
            if status == 200:
                return msgspec.json.decode(body)
        return None

    async def _get(self, url: str, timeout_s: float, bytes_max: int) -> tuple[int, bytes]:
        if self._session is None:
            self._session = aiohttp.ClientSession(
                headers=self._headers,
                connector=aiohttp.TCPConnector(limit=8, force_close=True, ssl=self._tls or True),
                trust_env=False,
            )
        timeout = aiohttp.ClientTimeout(total=timeout_s)
        async with self._session.get(
            url, timeout=timeout, allow_redirects=False, server_hostname=self._server_name
        ) as response:
            body = bytearray()
            async for part in response.content.iter_chunked(1 << 16):
                body += part
                if len(body) > bytes_max:
                    raise ValueError("the answer is too long")
            return response.status, bytes(body)
