"""A path to a port that can be slowed down and stopped while it is used: what a bad network does, for benchmarks.

Idea: it listens at another address and passes bytes on. All connections share its rate, in each direction, as they
share a link. What waits in it is little, so that a sender feels the rate at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
import time
from typing import Final, Self

_CHUNK_BYTES: Final = 16 << 10
_FAST_CHUNK_BYTES: Final = 256 << 10
_BUFFER_BYTES: Final = 64 << 10
_LOOK_S: Final = 0.01
_JOIN_S: Final = 5.0


class ThrottledPath:
    """Passes bytes between `host`:`port` and `to_host`:`port`, on a thread of its own. Use it as a context manager.

    Attributes:
        rate_bytes_s: of each direction; None: as fast as it can.
        stopped_until_s: nothing passes before that, of the monotonic clock.
    """

    def __init__(self, host: str, to_host: str, port: int) -> None:
        self._host, self._to_host, self._port = host, to_host, port
        self.rate_bytes_s: float | None = None
        self.stopped_until_s = 0.0
        self._stop_after: int | None = None
        self._stop_s = 0.0
        self._loop = asyncio.new_event_loop()
        self._free_s = {"up": 0.0, "down": 0.0}
        self._tasks: set[asyncio.Task[None]] = set()
        self._started = threading.Event()
        self._ended = asyncio.Event()
        self._thread = threading.Thread(target=self._run, name="throttled-path", daemon=True)

    def stop_after(self, size_bytes: int, seconds: float) -> None:
        """Let so many bytes come back from the far side, then nothing for so long."""
        self._stop_s, self._stop_after = seconds, size_bytes

    def __enter__(self) -> Self:
        self._thread.start()
        self._started.wait(_JOIN_S)
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._ended.set)
        self._thread.join(_JOIN_S)

    def _run(self) -> None:
        try:
            self._loop.run_until_complete(self._serve())
        finally:
            self._loop.close()

    async def _serve(self) -> None:
        async with await asyncio.start_server(self._connected, self._host, self._port):
            self._started.set()
            await self._ended.wait()
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _connected(self, near: asyncio.StreamReader, near_out: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        with contextlib.suppress(OSError, asyncio.CancelledError):
            far, far_out = await asyncio.open_connection(self._to_host, self._port)
            for writer in (near_out, far_out):
                found: socket.socket = writer.get_extra_info("socket")
                found.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _BUFFER_BYTES)
                writer.transport.set_write_buffer_limits(_BUFFER_BYTES)
            ways = [
                asyncio.ensure_future(self._pass(near, far_out, "up")),
                asyncio.ensure_future(self._pass(far, near_out, "down")),
            ]
            try:
                await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
            finally:
                for way in ways:
                    way.cancel()
                await asyncio.gather(*ways, return_exceptions=True)
                for writer in (near_out, far_out):
                    writer.close()

    async def _pass(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, way: str) -> None:
        while data := await reader.read(_CHUNK_BYTES if self.rate_bytes_s else _FAST_CHUNK_BYTES):
            await self._wait(len(data), way)
            writer.write(data)
            await writer.drain()

    async def _wait(self, size_bytes: int, way: str) -> None:
        """Until so many bytes may pass."""
        if self.rate_bytes_s:
            now_s = time.monotonic()
            self._free_s[way] = max(now_s, self._free_s[way]) + size_bytes / self.rate_bytes_s
            await asyncio.sleep(self._free_s[way] - now_s)
        if self._stop_after is not None and way == "down":
            self._stop_after -= size_bytes
            if self._stop_after < 0:
                self.stopped_until_s, self._stop_after = time.monotonic() + self._stop_s, None
        while time.monotonic() < self.stopped_until_s:  # noqa: ASYNC110  (another thread sets it)
            await asyncio.sleep(_LOOK_S)
