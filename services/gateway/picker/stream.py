"""One request at Envoy, as ASGI: `ProcessorStream` is to the gateway's endpoints what an HTTP connection is.

The client's headers and body come from Envoy's messages. An answer that is given before the request was routed, and an
error in place of an engine's answer, end the request at Envoy (ImmediateResponse). `route` hands the request back to
Envoy for an engine; from then on the engine's answer comes in, and what is sent is the answer as the client sees it.
Envoy ends its stream when the client leaves.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from grpc import aio

from mooncache.errors import EngineFailed
from mooncache.gateway.picker import messages
from mooncache.gateway.shell.exchange import App, Scope
from mooncache.proto.envoy import ext_proc_pb2 as pb
from mooncache.runtime.logs import Event, get_logger

SCOPE_KEY: Final = "mooncache.envoy"
_AHEAD_MAX: Final = 4  # messages that are read before they are wanted
_REST_S: Final = 0.25
_LEAVE_S: Final = 10.0
_BAD_FILTER_STATUS: Final = 500
_CLIENT_LEFT: Final = {"type": "http.disconnect"}

log = get_logger(__name__)


@dataclass(frozen=True, slots=True)
class PickerSetup:
    """What every stream needs to know.

    engine_key: bearer key of engines that were started with the token of a fingerprint. fallback_count: see settings.
    """

    engine_key: Callable[[str], str]
    fallback_count: int


@dataclass(frozen=True, slots=True)
class ResponseHead:
    """How an answer begins. served: the endpoint that gave it, "" when Envoy does not say."""

    status: int
    served: str


class ProcessorStream:
    """One stream of Envoy.

    Args:
        read, write: the stream; read returns None at its end.
    """

    def __init__(
        self,
        read: Callable[[], Awaitable[pb.ProcessingRequest | None]],
        write: Callable[[pb.ProcessingResponse], Awaitable[None]],
        setup: PickerSetup,
    ) -> None:
        self._read, self._write = read, write
        self.setup = setup
        self.subset: frozenset[str] | None = None
        self.model_rewrite = ""
        self._inbox: asyncio.Queue[pb.ProcessingRequest | None] = asyncio.Queue(_AHEAD_MAX)
        self._gone = asyncio.Event()
        self._request_ended = self._request_trailers = False
        self._is_answered = False  # an engine's answer has begun
        self._answer_ended = self._answer_trailers = False
        self._start: tuple[int, list[tuple[str, str]]] | None = None  # an answer's head that is not out yet
        self._held = b""  # of an answer that goes out whole

    async def serve(self, app: App) -> None:
        """Read the request's head and let the application serve the request."""
        first = await self._read()
        if first is None or not first.HasField("request_headers"):
            return
        if unsuitable := messages.unsuitable(first):
            log.error(Event.PICKER_UNSUITABLE, reason=unsuitable)
            text = f"Envoy's ext_proc filter is configured wrongly: {unsuitable}.\n"
            await self._put(messages.immediate(_BAD_FILTER_STATUS, (), text.encode(), "filter_unsuitable"))
            return
        scope = self._scope(first)
        pump = asyncio.create_task(self._pump(), name="ext_proc")
        served = asyncio.ensure_future(app(scope, self.receive, self.send))
        try:
            await asyncio.shield(served)
        except asyncio.CancelledError:
            # The client has left, or Envoy. The application learns it as of any connection, and reports the end.
            self._leave()
            await asyncio.wait({served}, timeout=_LEAVE_S)
            raise
        finally:
            pump.cancel()
            served.cancel()

    def _scope(self, first: pb.ProcessingRequest) -> Scope:
        headers = messages.headers_of(first.request_headers)
        found = {name: value.decode("latin-1") for name, value in headers}
        path, _, query = found.get(b":path", "/").partition("?")
        self.subset = messages.subset_in(first)
        self.model_rewrite = found.get(messages.MODEL_REWRITE.encode(), "")
        if first.request_headers.end_of_stream:
            self._inbox.put_nowait(pb.ProcessingRequest(request_body=pb.HttpBody(end_of_stream=True)))
        return {
            "type": "http",
            "http_version": "1.1",
            "method": found.get(b":method", "GET"),
            "scheme": found.get(b":scheme", "http"),
            "path": path,
            "raw_path": path.encode("latin-1"),
            "query_string": query.encode("latin-1"),
            "root_path": "",
            "headers": [(name, value) for name, value in headers if not name.startswith(b":")],
            SCOPE_KEY: self,
        }

    async def _pump(self) -> None:
        """Take messages in as they come, a few ahead, so that the end of the stream is seen at once."""
        try:
            while (message := await self._read()) is not None:
                await self._inbox.put(message)
        except (aio.UsageError, aio.BaseError):
            return  # the stream was cut
        finally:
            self._leave()

    def _leave(self) -> None:
        """Nothing more will come."""
        self._gone.set()
        with contextlib.suppress(asyncio.QueueFull):
            self._inbox.put_nowait(None)  # whoever waits sees it; who has messages left reads them first

    async def _next(self) -> pb.ProcessingRequest | None:
        """The next message, None at the end."""
        if self._gone.is_set() and self._inbox.empty():
            return None
        return await self._inbox.get()

    # the client's side

    async def receive(self) -> dict[str, Any]:
        """The next piece of the request, or the client's leaving: as ASGI has it."""
        if self._request_ended:
            await self._gone.wait()
            return _CLIENT_LEFT
        message = await self._next()
        if message is None:
            return _CLIENT_LEFT
        self._request_trailers = message.HasField("request_trailers")
        self._request_ended = self._request_trailers or message.request_body.end_of_stream
        return {
            "type": "http.request",
            "body": message.request_body.body,
            "more_body": not self._request_ended,
        }

    async def send(self, message: Mapping[str, Any]) -> None:
        """A piece of the answer: as ASGI has it."""
        if message["type"] == "http.response.start":
            headers = [
                (name.decode("latin-1"), value.decode("latin-1")) for name, value in message["headers"]
            ]
            self._start = (message["status"], headers)
            return
        data, is_last = message.get("body", b""), not message.get("more_body", False)
        if self._start is not None:
            status, headers = self._start
            if not self._is_answered or status != 200:
                self._held += data
                if is_last:
                    kept = [(name, value) for name, value in headers if name != "content-length"]
                    await self._put(messages.immediate(status, kept, self._held, "endpoint_picker"))
                return
            self._start = None
            names = {name for name, _ in headers}
            await self._put(
                messages.answered(headers, () if "content-length" in names else ("content-length",))
            )
        if is_last:
            await self._end(data)
        elif data:
            for piece in messages.answer_pieces(data, is_last=False):
                await self._put(piece)

    async def _end(self, data: bytes) -> None:
        """The answer's last bytes go when the engine's have all come, so that Envoy may use its connection again."""
        with contextlib.suppress(TimeoutError, EngineFailed):
            async with asyncio.timeout(_REST_S):
                while await self.read_answer():
                    pass
        for piece in messages.answer_pieces(data, is_last=not self._answer_trailers):
            await self._put(piece)
        if self._answer_trailers:
            await self._put(pb.ProcessingResponse(response_trailers=pb.TrailersResponse()))

    async def _put(self, response: pb.ProcessingResponse) -> None:
        try:
            await self._write(response)
        except (aio.UsageError, aio.BaseError):
            self._leave()  # Envoy has cut the stream

    # the engine's side

    async def route(
        self, headers: Mapping[str, str], remove: Sequence[str], endpoints: str, body: bytes
    ) -> ResponseHead:
        """Have Envoy send the request, with this body, to the first of the endpoints that takes it.

        Raises:
            EngineFailed: Envoy ended its stream before the answer began.
        """
        await self._put(messages.routed(headers, remove, endpoints))
        for piece in messages.request_pieces(body, is_last=not self._request_trailers):
            await self._put(piece)
        if self._request_trailers:
            await self._put(pb.ProcessingResponse(request_trailers=pb.TrailersResponse()))
        message = await self._next()
        if message is None or not message.HasField("response_headers"):
            raise EngineFailed("Envoy ended the request before an engine answered.")
        self._is_answered = True
        self._answer_ended = message.response_headers.end_of_stream
        found = dict(messages.headers_of(message.response_headers))
        status = found.get(b":status", b"")
        return ResponseHead(int(status) if status.isdigit() else 0, messages.served_in(message))

    async def read_answer(self) -> bytes:
        """What has come of the engine's answer, b"" at its end. Raises EngineFailed when Envoy ends it early."""
        while not self._answer_ended:
            message = await self._next()
            if message is None:
                raise EngineFailed("The engine's answer ended early, or its client left.")
            self._answer_trailers = message.HasField("response_trailers")
            self._answer_ended = self._answer_trailers or message.response_body.end_of_stream
            if message.response_body.body:
                return message.response_body.body
        return b""
