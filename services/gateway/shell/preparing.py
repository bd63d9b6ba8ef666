"""Bodies that are too large for the event loop: read by processes of their own (tokens/beside.py), in turn, within a
time.

A process is started when it is first needed. One that takes too long or ends is killed, and the next body gets a new
one: a body that breaks its reader costs its own request and no other. A request whose client leaves lets its reader
finish, because to start one costs more than to wait for it.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
from collections.abc import Callable, Sequence
from typing import Final

import msgspec

from mooncache.errors import DeadlineExceeded, Internal, Overloaded
from mooncache.gateway import heap
from mooncache.gateway.core import faults
from mooncache.gateway.core.bodies import FairQueue
from mooncache.gateway.core.body import InferenceRequest, Prepared
from mooncache.gateway.core.prepared import (
    ANSWERS,
    FRAME_BYTES_MAX,
    Drop,
    Parse,
    Parsed,
    Refused,
    Tokenize,
    Tokenized,
    tokenized_of,
)

QUEUE_MAX: Final = 256
_MODULE: Final = "mooncache.gateway.tokens.beside"
_PIECE_BYTES: Final = 256 << 10
_END_S: Final = 5.0
# Long enough that most of what a body was made into is free again, and a flood of bodies is not trimmed after each.
_TRIM_S: Final = 1.0

Resolve = Callable[[InferenceRequest], Tokenize]


class Preparing:
    """Reads large bodies in other processes.

    Args:
        processes: bodies that are read at the same time.
        timeout_s: for one body, waiting for its turn included.
        cache_bytes: memory of each process for tokens of earlier prompts.
    """

    def __init__(self, *, processes: int, timeout_s: float, cache_bytes: int) -> None:
        self._timeout_s, self._cache_bytes = timeout_s, cache_bytes
        self._idle = [_Reader(cache_bytes) for _ in range(processes)]
        self._readers = tuple(self._idle)
        self._queue: FairQueue[asyncio.Future[_Reader]] = FairQueue(QUEUE_MAX)
        self._talks: set[asyncio.Task[Prepared]] = set()
        self._trim: asyncio.TimerHandle | None = None
        self._trims = 0  # that are still to be made

    @property
    def pids(self) -> list[int]:
        """The processes that run now."""
        return [reader.pid for reader in self._readers if reader.pid]

    async def prepare(
        self, parts: Sequence[bytes], resolve: Resolve, *, tenant: str, chat: bool, choice_count_max: int
    ) -> Prepared:
        """Read a body.

        Args:
            resolve: says, for what the body wants, what is to be made of it. May raise Refusal and MooncacheError,
                which come out of here.

        Raises:
            Refusal: the body is wrong, or was not read in time (504); there are too many before it (429).
        """
        until_s = asyncio.get_running_loop().time() + self._timeout_s
        reader = await self._turn(tenant, until_s)
        parse = Parse(chat, choice_count_max)
        talk = asyncio.create_task(self._talk(reader, parse, parts, resolve, until_s), name="prepare")
        self._talks.add(talk)
        talk.add_done_callback(self._over)
        try:
            return await asyncio.shield(talk)
        finally:
            # Its exception refers to this frame: a circle that would hold the body until the collector comes by.
            del talk

    async def _turn(self, tenant: str, until_s: float) -> _Reader:
        """A reader once one is free for this body."""
        if self._idle:
            return self._idle.pop()
        turn: asyncio.Future[_Reader] = asyncio.get_running_loop().create_future()
        if not self._queue.put(tenant, turn):
            raise faults.refuse(Overloaded("Too many large bodies wait to be read."))
        try:
            async with asyncio.timeout_at(until_s):
                return await turn
        except BaseException as error:
            self._queue.remove(tenant, turn)
            if turn.done() and not turn.cancelled():
                self._free(turn.result())  # its turn came in the moment in which it left
            if not isinstance(error, TimeoutError):
                raise
            text = f"Other large bodies took the {self._timeout_s:g} s in which this one had to be read."
            raise faults.refuse(Overloaded(text)) from None

    def _free(self, reader: _Reader) -> None:
        """Hand a reader to the next one that waits."""
        while (turn := self._queue.get()) is not None:
            if not turn.done():
                turn.set_result(reader)
                return
        self._idle.append(reader)

    async def _talk(
        self, reader: _Reader, parse: Parse, parts: Sequence[bytes], resolve: Resolve, until_s: float
    ) -> Prepared:
        try:
            async with asyncio.timeout_at(until_s):
                return await reader.read(parse, parts, resolve)
        except TimeoutError:
            await reader.end()
            error = DeadlineExceeded(f"The request's body could not be read within {self._timeout_s:g} s.")
            raise faults.refuse(error, status=504) from None
        except (OSError, EOFError, msgspec.DecodeError) as error:
            await reader.end()
            text = f"The process that read the request's body ended ({type(error).__name__})."
            raise Internal(text) from None
        except asyncio.CancelledError:
            await reader.end()
            raise
        finally:
            self._free(reader)

    def _over(self, talk: asyncio.Task[Prepared]) -> None:
        self._talks.discard(talk)
        # The caller may hold the body for a little longer, until it is answered: twice.
        self._trims = 2
        self._trim_later()
        if not talk.cancelled():
            talk.exception()  # the caller may have left

    def _trim_later(self) -> None:
        if self._trim is None and self._trims > 0:
            self._trims -= 1
            self._trim = asyncio.get_running_loop().call_later(_TRIM_S, self._give_back)

    def _give_back(self) -> None:
        self._trim = None
        asyncio.get_running_loop().run_in_executor(None, heap.trim)
        self._trim_later()

    async def close(self) -> None:
        """End all processes."""
        if self._trim is not None:
            self._trim.cancel()
        for talk in tuple(self._talks):
            talk.cancel()
        if self._talks:
            await asyncio.wait(tuple(self._talks))
        for reader in self._readers:
            await reader.end()


class _Reader:
    """One process, or none while it is not needed."""

    def __init__(self, cache_bytes: int) -> None:
        self._cache_bytes = cache_bytes
        self._process: asyncio.subprocess.Process | None = None

    @property
    def pid(self) -> int:
        return self._process.pid if self._process is not None else 0

    async def read(self, parse: Parse, parts: Sequence[bytes], resolve: Resolve) -> Prepared:
        if self._process is None or self._process.returncode is not None:
            self._process = await asyncio.create_subprocess_exec(
                sys.executable,
                "-m",
                _MODULE,
                str(self._cache_bytes),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                limit=_PIECE_BYTES,
            )
        await self._send(msgspec.msgpack.encode(parse))
        await self._send(*parts)
        request = await self._receive()
        if not isinstance(request, Parsed):
            raise EOFError
        try:
            make = resolve(request.request)
        except Exception:
            await self._send(msgspec.msgpack.encode(Drop()))
            raise
        await self._send(msgspec.msgpack.encode(make))
        found = await self._receive()
        if not isinstance(found, Tokenized):
            raise EOFError
        return Prepared(request.request, found.forward, tokenized_of(found))

    async def _send(self, *parts: bytes) -> None:
        """One frame. Raises OSError."""
        assert self._process is not None
        assert self._process.stdin is not None
        pipe = self._process.stdin
        pipe.write(sum(map(len, parts)).to_bytes(8, "little"))
        for part in parts:
            view = memoryview(part)
            for at in range(0, len(part), _PIECE_BYTES):
                pipe.write(view[at : at + _PIECE_BYTES])
                await pipe.drain()
        await pipe.drain()

    async def _receive(self) -> object:
        """The next answer. Raises Refusal, EOFError."""
        assert self._process is not None
        assert self._process.stdout is not None
        pipe = self._process.stdout
        try:
            size = int.from_bytes(await pipe.readexactly(8), "little")
            if size > FRAME_BYTES_MAX:
                raise EOFError
            data = await pipe.readexactly(size)
        except asyncio.IncompleteReadError:
            raise EOFError from None
        found: object = msgspec.msgpack.decode(data, type=ANSWERS)
        if isinstance(found, Refused):
            raise faults.Refusal(found.fault)
        return found

    async def end(self) -> None:
        """Kill the process."""
        process, self._process = self._process, None
        if process is None:
            return
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_END_S):
                await process.wait()
