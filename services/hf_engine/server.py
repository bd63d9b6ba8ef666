"""The engine's HTTP side: OpenAI's completions and chat, models, health and metrics.

Idea: a request becomes sequences; their outputs come back through one queue for each request, which is filled on the
event loop once per step. Whatever way a handler ends (answer given, client gone, error), its sequences are aborted in
`finally`, which costs nothing when they are over.
"""

from __future__ import annotations

import asyncio
import json
import re
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from dataclasses import dataclass
from typing import Any

import msgspec
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from mooncache.errors import (
    Draining,
    EngineFailed,
    InvalidArgument,
    ModelUnknown,
    MooncacheError,
    Overloaded,
    TooLarge,
)
from mooncache.hf_engine.core.sequence import FinishReason, Sequence
from mooncache.hf_engine.engine import Engine
from mooncache.hf_engine.output import Output
from mooncache.hf_engine.request_scope import RequestScope
from mooncache.hf_engine.requests import ParsedRequest, RequestLimits, parse
from mooncache.hf_engine.responses import CompletionBuilder
from mooncache.hf_engine.tokens import ChatTokenizer
from mooncache.kvcache.passport import Passport
from mooncache.runtime.engine_guard import EngineGuard
from mooncache.runtime.logs import Event, get_logger
from mooncache.runtime.plain_structlog import structlog

_BODY_BYTES_MAX = 64 << 20
_INLINE_BODY_BYTES = 16 << 10  # larger bodies are tokenised beside the event loop
_RETRY_AFTER_S = 1
_PARAM = re.compile(r"([a-z_]+): ")
_STATUS: dict[type[MooncacheError], tuple[int, str]] = {
    ModelUnknown: (404, "NotFoundError"),
    Overloaded: (429, "RateLimitError"),
    TooLarge: (413, "BadRequestError"),
    EngineFailed: (500, "InternalServerError"),
    Draining: (503, "ServiceUnavailableError"),
}

log = get_logger(__name__)

HttpHandler = Callable[[Request], Awaitable[Response]]


@dataclass(slots=True)
class ServerState:
    """What the handlers work with. api_key "" lets every caller in (on loopback only, see service.py)."""

    engine: Engine
    tokenizer: ChatTokenizer
    limits: RequestLimits
    passport: Passport
    api_key: str
    created: int


def deliver_to(loop: asyncio.AbstractEventLoop) -> Callable[[list[tuple[object, Output]]], None]:
    """Outputs of a step go to their requests' queues in one hop to the event loop."""

    def spread(outputs: list[tuple[Any, Output]]) -> None:
        for queue, output in outputs:
            queue.put_nowait(output)

    def deliver(outputs: list[tuple[object, Output]]) -> None:
        if not loop.is_closed():
            loop.call_soon_threadsafe(spread, outputs)

    return deliver


def make_app(state: ServerState) -> Starlette:
    """The ASGI application."""

    async def completions(request: Request) -> Response:
        return await _generate(state, request, chat=False)

    async def chat(request: Request) -> Response:
        return await _generate(state, request, chat=True)

    async def models(_: Request) -> Response:
        return _json({"object": "list", "data": [_model(state)]})

    async def model(request: Request) -> Response:
        if request.path_params["name"] != state.limits.model:
            raise ModelUnknown(f"model: The model `{request.path_params['name']}` does not exist.")
        return _json(_model(state))

    async def health(_: Request) -> Response:
        return Response(status_code=200 if state.engine.alive else 503)

    async def metrics(request: Request) -> Response:
        page, content_type = state.engine.metrics.registry.page_for(request.headers.get("accept", ""))
        return Response(page, media_type=content_type)

    guard = [Middleware(EngineGuard, key=state.api_key)] if state.api_key else []
    return Starlette(
        routes=[
            Route("/v1/completions", _answering(completions), methods=["POST"]),
            Route("/v1/chat/completions", _answering(chat), methods=["POST"]),
            Route("/v1/models", _answering(models)),
            Route("/v1/models/{name:path}", _answering(model)),
            Route("/health", health),
            Route("/metrics", metrics),
        ],
        exception_handlers={HTTPException: _http_error},
        middleware=[*guard, Middleware(RequestScope)],
    )


def _answering(handler: HttpHandler) -> HttpHandler:
    """The handler with every error in OpenAI's shape."""

    async def answering(request: Request) -> Response:
        try:
            return await handler(request)
        except MooncacheError as error:
            status, kind = _STATUS.get(type(error), (400, "BadRequestError"))
            headers = {"Retry-After": str(_RETRY_AFTER_S)} if status in {429, 503} else None
            return _json({"error": _error(error.message, status, kind)}, status, headers)
        except ClientDisconnect:
            return Response(status_code=499)

    return answering


def _error(message: str, status: int, kind: str) -> dict[str, object]:
    named = _PARAM.match(message)
    return {"message": message, "type": kind, "param": named[1] if named else None, "code": status}


async def _http_error(_: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    kind = "NotFoundError" if error.status_code == 404 else "BadRequestError"
    return _json({"error": _error(str(error.detail), error.status_code, kind)}, error.status_code)


def _json(content: object, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    return Response(msgspec.json.encode(content), status, headers, "application/json")


def _model(state: ServerState) -> dict[str, object]:
    return {
        "id": state.limits.model,
        "object": "model",
        "created": state.created,
        "owned_by": "mooncache",
        "root": state.limits.model,
        "parent": None,
        "max_model_len": state.limits.tokens_max,
    }


async def _body(request: Request) -> tuple[object, int]:
    """The decoded body and its size."""
    data = bytearray()
    async for piece in request.stream():
        data += piece
        if len(data) > _BODY_BYTES_MAX:
            raise TooLarge(f"The body is larger than {_BODY_BYTES_MAX} bytes.")
    try:
        return json.loads(data), len(data)
    except (ValueError, RecursionError) as error:
        raise InvalidArgument(f"The body is not JSON: {error}") from None


async def _generate(state: ServerState, request: Request, *, chat: bool) -> Response:
    body, size = await _body(request)
    if size <= _INLINE_BODY_BYTES:
        asked = parse(body, state.tokenizer, state.limits, chat=chat)
    else:
        asked = await asyncio.to_thread(parse, body, state.tokenizer, state.limits, chat=chat)
    ident = structlog.contextvars.get_contextvars()["request_id"]  # by RequestScope
    answer = CompletionBuilder(
        asked,
        state.tokenizer,
        ident=f"{'chatcmpl' if chat else 'cmpl'}-{ident}",
        model=state.limits.model,
        created=int(time.time()),
    )
    queue: asyncio.Queue[Output] = asyncio.Queue()
    sequences = _sequences(state, asked, queue)
    state.engine.submit(sequences)
    headers = {"X-Request-Id": ident}
    if asked.stream:
        events = _events(state, answer, sequences, queue)
        headers["Cache-Control"] = "no-cache"
        return _Stream(events, lambda: _end(state, answer, sequences), headers)
    try:
        await _unless_gone(request, _collect(state, answer, sequences, queue))
    finally:
        _end(state, answer, sequences)
    return _json(answer.whole(), headers=headers)


class _Stream(StreamingResponse):
    """Events whose request ends with them, also when the client has gone before the first one was asked for: an
    iterator that was never begun does not come to its `finally`."""

    def __init__(
        self, events: AsyncIterator[bytes], end: Callable[[], None], headers: dict[str, str]
    ) -> None:
        super().__init__(events, headers=headers, media_type="text/event-stream")
        self._end = end

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._end()


def _sequences(state: ServerState, asked: ParsedRequest, queue: asyncio.Queue[Output]) -> list[Sequence]:
    return [
        Sequence(
            tokens=list(prompt),
            sampling=sampling,
            passport=state.passport,
            block_tokens=state.passport.block_tokens,
            salt=asked.salt,
            priority=asked.priority,
            hint=asked.hint,
            sink=queue,
            index=number * asked.n + copy,
        )
        for number, (prompt, sampling) in enumerate(zip(asked.prompts, asked.sampling, strict=True))
        for copy in range(asked.n)
    ]


def _end(state: ServerState, answer: CompletionBuilder, sequences: list[Sequence]) -> None:
    """However a request ended: nothing runs on for it, and one line tells how it went."""
    state.engine.abort(sequences)
    cache = answer.cache_report()
    log.info(
        Event.HF_REQUEST_FINISHED,
        role=answer.asked.hint.role,
        finished=answer.finished,
        prompt_tokens=sum(len(prompt) for prompt in answer.asked.prompts),
        completion_tokens=sum(len(choice.chosen) for choice in answer.choices),
        outcome=cache.outcome,
        hit_tokens=cache.hit_tokens,
        loaded_tokens=cache.loaded_tokens,
        waited_ms=cache.waited_ms,
    )


def _refuse_broken(output: Output) -> None:
    """Raises EngineFailed or Draining for an output that is not an answer."""
    if output.finish is FinishReason.ERROR:
        raise EngineFailed(output.message)
    if output.finish is FinishReason.ABORT:
        raise Draining("The engine is shutting down; send the request to another engine.")


async def _collect(
    state: ServerState, answer: CompletionBuilder, sequences: list[Sequence], queue: asyncio.Queue[Output]
) -> None:
    while not answer.finished:
        output = await queue.get()
        found = answer.take(output)
        if found is None:
            continue
        _refuse_broken(output)
        if found[0].finish and not output.finish:  # a stop string; the engine does not know
            state.engine.abort([sequences[output.index]])


async def _unless_gone(request: Request, work: Coroutine[None, None, None]) -> None:
    """Do the work, or end it when the client closes the connection. Raises ClientDisconnect."""

    async def gone() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    working, watching = asyncio.ensure_future(work), asyncio.ensure_future(gone())
    try:
        await asyncio.wait((working, watching), return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientDisconnect
        working.result()
    finally:
        working.cancel()
        watching.cancel()


async def _events(
    state: ServerState, answer: CompletionBuilder, sequences: list[Sequence], queue: asyncio.Queue[Output]
) -> AsyncIterator[bytes]:
    """Server-sent events; several that are ready at once leave in one piece."""
    try:
        while not answer.finished:
            outputs = [await queue.get()]
            while not queue.empty():
                outputs.append(queue.get_nowait())
            yield b"".join(_event(state, answer, sequences, output) for output in outputs)
        if answer.asked.include_usage:
            yield _data(answer.usage_chunk())
        yield b"data: [DONE]\n\n"
    except (EngineFailed, Draining) as error:
        yield _data({"error": _error(error.message, *_STATUS[type(error)])}) + b"data: [DONE]\n\n"


def _event(state: ServerState, answer: CompletionBuilder, sequences: list[Sequence], output: Output) -> bytes:
    found = answer.take(output)
    if found is None:
        return b""
    _refuse_broken(output)
    choice, delta = found
    if choice.finish and not output.finish:
        state.engine.abort([sequences[output.index]])
    role = _data(answer.role_chunk(choice)) if answer.asked.chat and delta.first else b""
    return role + _data(answer.chunk(choice, delta))


def _data(content: object) -> bytes:
    return b"data: " + msgspec.json.encode(content) + b"\n\n"
