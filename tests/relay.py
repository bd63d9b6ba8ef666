"""A path between two ends that somebody listens on, changes, or cuts without a word."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable

Change = Callable[[bytes], bytes]


def unchanged(data: bytes) -> bytes:
    return data


class Relay:
    """Passes bytes on and keeps them; `up` and `down` may change them. `lose` loses all that comes for connections that
    are open then, as a firewall that has forgotten them does, or a host that is gone. `cut` loses all that comes, also
    of new connections, until `heal`; then all that are open are reset."""

    def __init__(self, target: str) -> None:
        self._host, _, port = target.rpartition(":")
        self._port = int(port)
        self.seen = bytearray()
        self.up: Change = unchanged
        self.down: Change = unchanged
        self.target = ""
        self.opened = self._lost = 0
        self.is_cut = False
        self._open: dict[int, asyncio.StreamWriter] = {}

    async def connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there, back = await asyncio.open_connection(self._host, self._port)
        self.opened += 1
        number = self.opened
        self._open[number] = writer
        try:
            with contextlib.suppress(OSError):
                await asyncio.gather(
                    self._pass(reader, back, "up", number), self._pass(there, writer, "down", number)
                )
        finally:
            del self._open[number]

    def lose(self) -> None:
        self._lost = self.opened

    def cut(self) -> None:
        self.is_cut = True

    def heal(self) -> None:
        self.is_cut = False
        self.lose()
        for writer in self._open.values():
            writer.transport.abort()

    async def _pass(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, way: str, number: int
    ) -> None:
        try:
            while data := await reader.read(1 << 16):
                if self.is_cut or number <= self._lost:
                    continue
                self.seen += data
                writer.write(getattr(self, way)(data))
                await writer.drain()
        finally:
            writer.close()


@contextlib.asynccontextmanager
async def relay_to(target: str) -> AsyncIterator[Relay]:
    relay = Relay(target)
    server = await asyncio.start_server(relay.connection, "127.0.0.1", 0)
    relay.target = f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
    try:
        yield relay
    finally:
        server.close()
