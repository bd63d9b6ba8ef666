"""uvicorn's HTTP/1.1 with three limits it lacks: how long a request's head may take, how large it may be, and how many
connections may be open without a request.

Without them a client that sends one byte a minute, or headers without end, holds a connection and memory forever, and
a stranger without a key takes all descriptors. Of idle connections the one that is idle longest is closed.
"""

from __future__ import annotations

import asyncio
import weakref
from typing import Final

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

HEAD_BYTES_MAX: Final = 64 << 10
HEAD_TIMEOUT_S: Final = 15.0
IDLE_COUNT_MAX: Final = 1024
# By event loop, the longest idle first; a dictionary keeps the order.
_IDLE: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, dict[GuardedProtocol, None]] = (
    weakref.WeakKeyDictionary()
)


class GuardedProtocol(HttpToolsProtocol):
    """uvicorn's HTTP/1.1 with more limits. Between two requests uvicorn's own keep-alive limit applies."""

    _head_timer: asyncio.TimerHandle | None = None
    _head_bytes = 0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._arm()
        self._is_idle()

    def connection_lost(self, exc: Exception | None) -> None:
        self._disarm()
        _IDLE.get(self.loop, {}).pop(self, None)
        super().connection_lost(exc)

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if not self.transport.is_closing() and self.cycle is not None and self.cycle.response_complete:
            self._is_idle()

    def _is_idle(self) -> None:
        """It waits for a request, as the last of those that do; the first one makes room."""
        idle = _IDLE.setdefault(self.loop, {})
        idle.pop(self, None)
        idle[self] = None
        if len(idle) > IDLE_COUNT_MAX:
            oldest = next(iter(idle))
            del idle[oldest]
            oldest.transport.close()

    def on_message_begin(self) -> None:
        self._head_bytes = 0
        self._arm()
        super().on_message_begin()

    def on_url(self, url: bytes) -> None:
        self._count(len(url))
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        self._count(len(name) + len(value) + 4)
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self._disarm()
        _IDLE.get(self.loop, {}).pop(self, None)
        super().on_headers_complete()

    def _count(self, size: int) -> None:
        self._head_bytes += size
        if self._head_bytes > HEAD_BYTES_MAX:
            raise ValueError("the head of the request is too large")  # the parser answers 400 and closes

    def _arm(self) -> None:
        self._disarm()
        self._head_timer = self.loop.call_later(HEAD_TIMEOUT_S, self._too_slow)

    def _disarm(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _too_slow(self) -> None:
        self._head_timer = None
        if self.cycle is None or self.cycle.response_complete:
            self.transport.close()
