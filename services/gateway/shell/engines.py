"""HTTP to the engines: one shared pool of connections, their key, errors of the catalogue, and the calls of both legs.

Closing the answer closes the connection, which is how an engine learns that the rest is not wanted.
"""

from __future__ import annotations

import asyncio
import contextlib
import io
import os
import ssl
from collections.abc import Callable, Sequence
from http import HTTPStatus
from types import TracebackType
from typing import Final, NamedTuple, Protocol, Self

import aiohttp

from mooncache.errors import EngineDied, EngineFailed, EngineTimeout, EngineUnavailable, Overloaded, TooLarge
from mooncache.gateway.core import faults
from mooncache.gateway.core.answer import Splitter, TokenUsage, edit_answer, has_data
from mooncache.gateway.core.faults import Refusal
from mooncache.gateway.core.plan import LegPlan
from mooncache.gateway.shell.exchange import Exchange
from mooncache.kvcache.leg_hint import CacheReport
from mooncache.runtime import tracing

ANSWER_BYTES_MAX: Final = 512 << 20
_ERROR_BYTES_MAX: Final = 1 << 20
# Below the five seconds after which uvicorn, hence every engine, closes an idle connection.
_ENGINES_MAX: Final = 4096  # whose key is remembered
_KEEP_ALIVE_S: Final = 3.0
_READ_BYTES: Final = 1 << 18
_WHOLE_BYTES_MAX: Final = 1 << 20
_IDLE_RACE_S: Final = 1.0
_LAST_WORDS_S: Final = 5.0
_DRAIN_S: Final = 0.25
_PREFILL_ANSWER_BYTES_MAX: Final = 64 << 20
# The engine understood the request and refuses it: no other instance would take it.
_CLIENT_FAULTS: Final = frozenset({400, 413, 415, 422})


class Engines:
    """Makes calls; `close` ends those under way."""

    def __init__(
        self,
        keys: Callable[[], Sequence[str]],
        connect_timeout_s: float,
        tls: ssl.SSLContext | None = None,
        server_name: str = "",
    ) -> None:
        """keys: those that engines may take, the likeliest first. An engine takes the one that it was started with."""
        self._keys = keys
        self._taken: dict[str, str] = {}  # by URL, of engines that did not take the first one
        self._tls = tls
        self._server_name = server_name or None
        self._timeout = aiohttp.ClientTimeout(
            total=None, sock_connect=connect_timeout_s, connect=connect_timeout_s, sock_read=None
        )
        self._connect_timeout_s = connect_timeout_s
        self._session: aiohttp.ClientSession | None = None

    def open(self) -> None:
        """Make the session; has to run inside the loop."""
        connector = aiohttp.TCPConnector(
            limit=0, keepalive_timeout=_KEEP_ALIVE_S, ttl_dns_cache=30, ssl=self._tls or True
        )
        self._session = aiohttp.ClientSession(
            connector=connector,
            timeout=self._timeout,
            read_bufsize=_READ_BYTES,
            auto_decompress=False,
            cookie_jar=aiohttp.DummyCookieJar(),
            trust_env=False,
        )

    async def close(self) -> None:
        if self._session is not None:
            session, self._session = self._session, None
            await session.close()

    async def post(self, url: str, path: str, body: bytes, request_id: str) -> EngineAnswer:
        """Send a body; returns when the head of a 200 answer is there.

        Raises:
            EngineUnavailable: nothing answers there. EngineDied: the connection broke while it had the request.
            EngineFailed: it answered 5xx. Overloaded: its queue is full. EngineTimeout: it gave up itself.
            Refusal: the engine refused the request itself (400, 413, 422); its own words.
        """
        assert self._session is not None, "open has not run"
        headers = {
            "content-type": "application/json",
            "accept-encoding": "identity",
            "x-request-id": request_id,
        }
        tracing.inject(headers)
        try:
            answer = EngineAnswer(await self._send_with_key(url, path, body, headers))
        except (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError) as error:
            raise EngineUnavailable(f"The engine cannot be reached ({_reason(error)}).") from None
        except (aiohttp.ClientError, OSError) as error:
            raise EngineDied(f"The engine closed the connection ({_reason(error)}).") from None
        except ValueError as error:
            raise EngineFailed(f"The engine sent an invalid answer ({_reason(error)}).") from None
        if answer.status != 200:
            async with answer:
                await raise_refusal(answer)
        return answer

    async def _send_with_key(
        self, url: str, path: str, body: bytes, headers: dict[str, str]
    ) -> aiohttp.ClientResponse:
        """Show the key that this engine took last. One that was started before the token was replaced has the other."""
        keys = self._keys()
        first = self._taken.get(url, keys[0])
        others = [key for key in keys if key != first]
        answer = await self._send(url + path, body, {**headers, "authorization": f"Bearer {first}"})
        for key in others:
            if answer.status != HTTPStatus.UNAUTHORIZED:
                return answer
            answer.close()
            answer = await self._send(url + path, body, {**headers, "authorization": f"Bearer {key}"})
            if answer.status != HTTPStatus.UNAUTHORIZED:
                self._note(url, key, keys)
        return answer

    def _note(self, url: str, key: str, keys: Sequence[str]) -> None:
        if key == keys[0]:
            self._taken.pop(url, None)
        elif len(self._taken) < _ENGINES_MAX:
            self._taken[url] = key

    async def _send(self, url: str, body: bytes, headers: dict[str, str]) -> aiohttp.ClientResponse:
        assert self._session is not None
        large = len(body) > _WHOLE_BYTES_MAX  # is then written in pieces, so that others get their turn
        loop = asyncio.get_running_loop()
        sent_s = loop.time()
        is_second = False
        while True:
            try:
                data = io.BytesIO(body) if large else body
                return await self._session.post(
                    url, data=data, headers=headers, allow_redirects=False, server_hostname=self._server_name
                )
            except aiohttp.ServerDisconnectedError:
                # An idle connection that the engine closed at this moment, if it was at once. A fresh one tells.
                if is_second or loop.time() - sent_s > _IDLE_RACE_S:
                    raise
                is_second = True
            except aiohttp.ClientConnectorError as error:
                if is_second:  # it took the request and is gone
                    raise aiohttp.ServerDisconnectedError(_reason(error)) from None
                raise


class DecodeSender(Protocol):
    """What sends a decode leg to its engine: `Engines`, or a proxy that does it for the gateway."""

    async def post(self, url: str, path: str, body: bytes, request_id: str) -> EngineAnswer:
        """As `Engines.post`."""
        ...


class EngineAnswer:
    """An open answer; leaving it by `async with` before its end aborts the request at the engine."""

    def __init__(self, response: aiohttp.ClientResponse) -> None:
        self._response = response
        self.status = response.status

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Give it back: for reuse when all was read, otherwise closed. Harmless to repeat."""
        if self._response.content.is_eof() and not self._response.content.exception():
            self._response.release()
        else:
            self._response.close()

    async def read_some(self) -> bytes:
        """What has come; b"" at the end. Raises EngineDied when the connection broke."""
        try:
            return await self._response.content.readany()
        except (aiohttp.ClientError, OSError) as error:
            raise EngineDied(f"The engine closed the connection ({_reason(error)}).") from None

    async def read_all(self, limit: int = 0) -> bytes:
        """All that is left. Raises AnswerTooLarge beyond `limit` bytes (0: the most there is), EngineDied."""
        limit = limit or ANSWER_BYTES_MAX
        parts: list[bytes] = []
        size = 0
        while part := await self.read_some():
            size += len(part)
            if size > limit:
                raise AnswerTooLarge(limit)
            parts.append(part)
        return b"".join(parts)


class AnswerTooLarge(Refusal):
    """The request asks for more than can be passed on; another engine would say the same, at the same cost."""

    def __init__(self, limit: int) -> None:
        error = TooLarge(f"The engine's answer has more than {limit} bytes. Ask for less, or for a stream.")
        super().__init__(faults.refuse(error, status=502, code="answer_too_large").fault)
        self.size_bytes = limit


class Prefilled(NamedTuple):
    """What an engine said that has computed a prompt."""

    usage: TokenUsage
    cache: CacheReport | None


class DecodeStream:
    """The answer of a decode leg once it has begun: the engine's events, or the whole of an answer without a stream.

    Attributes: `first` is the first block that has data, `body` the whole answer of a request that wants no stream.
    """

    def __init__(self, answer: EngineAnswer) -> None:
        self._answer = answer
        self._splitter = Splitter()
        self.first = b""
        self.body = b""

    async def read_whole(self) -> None:
        """Wait for all of an answer without a stream. Raises AnswerTooLarge, EngineDied."""
        self.body = await self._answer.read_all()

    async def begin(self, exchange: Exchange) -> None:
        """Wait for the first event. Comments before it (an engine's keep-alive) reach the client at once.

        Raises:
            EngineFailed: the stream ended or broke before it.
        """
        while block := await self.next():
            if has_data(block):
                self.first = block
                return
            await exchange.begin_stream()
            await exchange.write(block)
        raise EngineFailed("The engine ended its stream before the first token.")

    async def next(self) -> bytes:
        """The next complete events; b"" at the end. Raises EngineFailed when the connection breaks."""
        while data := await self._answer.read_some():
            if block := self._splitter.feed(data):
                return block
        return b""

    async def drain(self) -> None:
        """Read the end of a stream that is over, so that its connection can be used again."""
        with contextlib.suppress(TimeoutError, EngineFailed):
            async with asyncio.timeout(_DRAIN_S):
                await self._answer.read_some()

    def close(self) -> None:
        """Give the connection back. Harmless to repeat."""
        self._answer.close()


async def run_prefill(
    engines: Engines, leg: LegPlan, body: bytes, *, request_id: str, limit_s: float
) -> Prefilled:
    """Have a prompt computed; returns when its blocks are made.

    Raises:
        EngineUnavailable, EngineFailed, EngineTimeout: what went wrong. Refusal: the engine does not want this prompt.
    """
    try:
        with tracing.span("gateway.prefill", kind="client", instance=leg.instance_id):
            async with asyncio.timeout(limit_s):
                async with await engines.post(leg.url, "/v1/completions", body, request_id) as answer:
                    data = await answer.read_all(_PREFILL_ANSWER_BYTES_MAX)
    except TimeoutError:
        raise EngineTimeout(f"The prefill engine did not finish in {limit_s:g} s.") from None
    _, usage, cache = edit_answer(data)
    return Prefilled(usage, cache)


async def open_decode(
    engines: DecodeSender,
    leg: LegPlan,
    path: str,
    body: bytes,
    exchange: Exchange,
    *,
    is_stream: bool,
    limit_s: float,
) -> DecodeStream:
    """Send the request to the engine that generates; returns when there is something to tell the client.

    Raises:
        EngineUnavailable, EngineFailed, EngineTimeout: what went wrong. Refusal: the engine refuses the request.
    """
    stream: DecodeStream | None = None
    try:
        # The span ends with the first token; the engine's own goes on to the last.
        with tracing.span("gateway.decode", kind="client", instance=leg.instance_id):
            async with asyncio.timeout(limit_s):
                stream = DecodeStream(await engines.post(leg.url, path, body, exchange.request_id))
                if is_stream:
                    await stream.begin(exchange)
                else:
                    await stream.read_whole()
                return stream
    except TimeoutError:
        if stream is not None:
            stream.close()
        raise EngineTimeout(f"The engine did not answer within {limit_s:g} s.") from None
    except BaseException:
        if stream is not None:
            stream.close()
        raise


async def raise_refusal(answer: EngineAnswer) -> None:
    """Raise what an answer with another status than 200 means.

    Raises:
        Refusal: the engine refuses the request. Overloaded, EngineUnavailable, EngineTimeout, EngineFailed: see `post`.
    """
    try:
        async with asyncio.timeout(_LAST_WORDS_S):
            body = await answer.read_all(_ERROR_BYTES_MAX)
    except (TimeoutError, EngineFailed, Refusal):
        body = b""
    fault = faults.of_engine(answer.status, body)
    if answer.status in _CLIENT_FAULTS:
        raise Refusal(fault)
    text = f"The engine answered {answer.status}: {fault.message[:512]}"
    if answer.status == 429:
        raise Overloaded(text)
    if answer.status == 503:
        raise EngineUnavailable(text)
    if answer.status in (408, 504):
        raise EngineTimeout(text)
    raise EngineFailed(text)


def _reason(error: BaseException) -> str:
    """The cause in short, without the address: tenants read it."""
    number = getattr(getattr(error, "os_error", error), "errno", None)
    return os.strerror(number) if number else type(error).__name__
