"""The engine's stream to the client, event by event, with a limit on every wait."""

from __future__ import annotations

import asyncio

from mooncache.errors import EngineFailed, EngineTimeout
from mooncache.gateway.core.sse import Splitter, StreamEditor, has_data
from mooncache.gateway.shell.engines import EngineAnswer
from mooncache.gateway.shell.exchange import ClientGone, Exchange
from mooncache.gateway.shell.watchdog import Watchdog


class EngineStream:
    """An engine's stream up to its first event with data, and then the rest of it."""

    def __init__(self, answer: EngineAnswer) -> None:
        self.answer = answer
        self._splitter = Splitter()

    async def first(self, exchange: Exchange) -> bytes:
        """The first block that has data. Comments before it (an engine's keep-alive) reach the client at once.

        Raises:
            EngineFailed: the stream ended or broke before it.
        """
        while True:
            block = await self.next()
            if not block:
                raise EngineFailed("The engine ended its stream before the first token.")
            if has_data(block):
                return block
            await exchange.begin_stream()
            await exchange.write(block)

    async def next(self) -> bytes:
        """The next complete events; b"" at the end. Raises EngineFailed when the connection breaks."""
        while data := await self.answer.read_some():
            if block := self._splitter.feed(data):
                return block
        return b""


async def relay(
    source: EngineStream,
    editor: StreamEditor,
    exchange: Exchange,
    first: bytes,
    stall_s: float,
    write_s: float,
) -> None:
    """Forward everything from `first` to the end; the head of the answer is out already.

    Raises:
        EngineFailed: the stream broke, or ended without [DONE]. EngineTimeout: it was silent for `stall_s`.
        ClientGone: the client took nothing for `write_s`.
    """
    with Watchdog() as dog:
        try:
            block = first
            while block:
                out = editor.take(block)
                if out:
                    dog.expect("client", write_s)
                    await exchange.write(out)
                if editor.done or editor.fault is not None:
                    return
                dog.expect("engine", stall_s)
                block = await source.next()
        except asyncio.CancelledError:
            if not dog.fired or exchange.gone:
                raise
            task = asyncio.current_task()
            assert task is not None
            task.uncancel()
            if dog.fired == "client":
                exchange.gone = True
                raise ClientGone from None
            raise EngineTimeout(f"The engine sent nothing for {stall_s:g} s.") from None
    raise EngineFailed("The engine's stream ended in the middle of the answer.")
