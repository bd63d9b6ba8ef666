"""An engine that computes nothing: the engines' OpenAI API, answered at once with fixed tokens.

What is measured through it is everything but the engine. It speaks just enough HTTP/1.1 for that (no pipelining of
several requests at once) and must cost less than what stands before it: streams are written from ready-made bytes, one
write per event, as real engines do it. Its usage is a guess, which makes gateways doubt their tokenizer: a request with
`"null_usage": false` gets none.

`python -m mooncache.bench.null_engine --model NAME` prints one JSON line with its port and ends when its input ends.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import threading
from collections import deque
from dataclasses import dataclass
from typing import Any, cast

import msgspec

_HEAD_BYTES_MAX = 64 << 10
_BODY_BYTES_MAX = 256 << 20
_WRITE_BUFFER_MAX = 1 << 20
_TEXT = " tok"
_PATHS = {"/v1/chat/completions": True, "/v1/completions": False}


@dataclass(frozen=True, slots=True)
class NullEngineOptions:
    """What the engine serves, and how fast."""

    model: str = "null"  # the name it serves
    key: str = ""  # bearer key that requests must carry, "" for none
    events_per_s: float = 0.0
    """Events of one stream; 0 sends them as fast as the client takes them. A request's `null_events_per_s` wins."""
    first_token_s: float = 0.0  # pause before an answer
    tokens: int = 16  # of an answer without max_tokens
    prompt_tokens_per_s: float = 0.0  # prompts take their time one after another; 0: none


class NullEngine:
    """The server; use `start` and `close` within one event loop.

    Attributes: `open_count`, answers under way, and `idle`, set while there are none; `aborted_count`,
    answers whose client left; `bodies`, the last few requests' bodies; `prompt_tokens` and `output_tokens`, those of
    answers that were given to their end, which GET /counted tells, too.
    """

    def __init__(self, options: NullEngineOptions | None = None) -> None:
        self.options = options or NullEngineOptions()
        self.open_count = self.aborted_count = 0
        self.idle = asyncio.Event()
        self.idle.set()
        self.bodies: deque[dict[str, Any]] = deque(maxlen=32)
        self.computing = asyncio.Lock()  # of prompts
        self.prompt_tokens = self.output_tokens = 0
        self.port = 0
        self._server: asyncio.Server | None = None
        self._connections: set[_Connection] = set()

    async def start(self, host: str = "127.0.0.1", port: int = 0) -> int:
        """Listens; returns the port. Raises OSError when it cannot be had."""
        loop = asyncio.get_running_loop()
        self._server = await loop.create_server(lambda: _Connection(self), host, port, backlog=1024)
        self.port = self._server.sockets[0].getsockname()[1]
        return self.port

    async def close(self) -> None:
        """Close the port and all connections."""
        if self._server is not None:
            self._server.close()
            for connection in list(self._connections):
                connection.abort()
            await self._server.wait_closed()
            self._server = None

    @property
    def counted(self) -> dict[str, int]:
        """Tokens of all answers that were given to their end."""
        return {"prompt_tokens": self.prompt_tokens, "output_tokens": self.output_tokens}

    def enter(self, connection: _Connection) -> None:
        self._connections.add(connection)

    def leave(self, connection: _Connection) -> None:
        self._connections.discard(connection)


class _Connection(asyncio.Protocol):
    def __init__(self, engine: NullEngine) -> None:
        self._engine = engine
        self._buffer = bytearray()
        self._transport: asyncio.Transport | None = None
        self._task: asyncio.Task[None] | None = None
        self._room = asyncio.Event()
        self._room.set()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)  # uvloop's transport is not one by its class
        self._transport.set_write_buffer_limits(high=_WRITE_BUFFER_MAX)
        self._engine.enter(self)

    def connection_lost(self, error: Exception | None) -> None:
        self._engine.leave(self)
        if self._task is not None and not self._task.done():
            self._engine.aborted_count += 1
            self._task.cancel()

    def pause_writing(self) -> None:
        self._room.clear()

    def resume_writing(self) -> None:
        self._room.set()

    def abort(self) -> None:
        if self._transport is not None:
            self._transport.abort()

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        end = self._buffer.find(b"\r\n\r\n")
        if end < 0:
            if len(self._buffer) > _HEAD_BYTES_MAX:
                self.abort()
            return
        method, path, headers = _parse_head(bytes(self._buffer[:end]))
        if headers.get("transfer-encoding", "").lower() == "chunked":
            self._take_chunked(method, path, headers, end + 4)
            return
        length = int(headers.get("content-length", "0") or "0")
        if length > _BODY_BYTES_MAX:
            self.abort()
            return
        if len(self._buffer) < end + 4 + length:
            return
        body = bytes(self._buffer[end + 4 : end + 4 + length])
        del self._buffer[: end + 4 + length]
        self._serve(method, path, headers, body)

    def _take_chunked(self, method: str, path: str, headers: dict[str, str], start: int) -> None:
        """A body in chunks, as proxies send it: read when its end is there."""
        if len(self._buffer) > _BODY_BYTES_MAX:
            self.abort()
            return
        if not self._buffer.endswith(b"0\r\n\r\n"):
            return
        parts: list[bytes] = []
        at, whole = start, bytes(self._buffer)
        while True:
            line = whole.find(b"\r\n", at)
            try:
                size = int(whole[at:line], 16) if line >= 0 else -1
            except ValueError:
                self.abort()
                return
            if line < 0 or len(whole) < line + 4 + size:
                return  # what looked like the end was a part of the body
            if size <= 0:
                break
            parts.append(whole[line + 2 : line + 2 + size])
            at = line + 4 + size
        self._buffer.clear()
        self._serve(method, path, headers, b"".join(parts))

    def _serve(self, method: str, path: str, headers: dict[str, str], body: bytes) -> None:
        options = self._engine.options
        if path == "/health":
            return self._answer(200, {})
        if options.key and headers.get("authorization") != f"Bearer {options.key}":
            return self._answer(401, _error("wrong key", 401))
        if path == "/counted":
            return self._answer(200, self._engine.counted)
        if path == "/v1/models":
            card = {"id": options.model, "object": "model", "created": 0, "owned_by": "null"}
            return self._answer(200, {"object": "list", "data": [card]})
        if path not in _PATHS or method != "POST":
            return self._answer(404, _error(f"no {path} here", 404))
        try:
            fields = msgspec.json.decode(body, type=dict[str, Any])
            tokens = int(fields.get("max_completion_tokens") or fields.get("max_tokens") or options.tokens)
        except (msgspec.DecodeError, TypeError, ValueError) as error:
            return self._answer(400, _error(f"not a request: {error}", 400))
        self._engine.bodies.append(fields)
        request_id = headers.get("x-request-id", "null")
        work = self._generate(fields, chat=_PATHS[path], tokens=max(0, tokens), request_id=request_id)
        self._task = asyncio.ensure_future(work)
        return None

    async def _generate(self, fields: dict[str, Any], *, chat: bool, tokens: int, request_id: str) -> None:
        options = self._engine.options
        self._engine.open_count += 1
        self._engine.idle.clear()
        try:
            if options.first_token_s:
                await asyncio.sleep(options.first_token_s)
            if options.prompt_tokens_per_s:
                async with self._engine.computing:
                    await asyncio.sleep(_prompt_tokens(fields) / options.prompt_tokens_per_s)
            answer = _NullAnswer(
                chat,
                options.model,
                request_id,
                tokens,
                _prompt_tokens(fields),
                computed=options.prompt_tokens_per_s > 0,
            )
            if not fields.get("stream"):
                self._count(answer)
                self._answer(200, answer.whole(), request_id)
                return
            wants_usage = bool((fields.get("stream_options") or {}).get("include_usage"))
            wants_usage = wants_usage and fields.get("null_usage") is not False
            rate = float(fields.get("null_events_per_s") or options.events_per_s)
            await self._stream(answer, wants_usage, rate, request_id)
        finally:
            self._engine.open_count -= 1
            if not self._engine.open_count:
                self._engine.idle.set()

    async def _stream(self, answer: _NullAnswer, wants_usage: bool, rate: float, request_id: str) -> None:
        assert self._transport is not None
        head = (
            "HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\ntransfer-encoding: chunked\r\n"
            f"x-request-id: {request_id}\r\n\r\n"
        )
        write, interval_s = self._transport.write, 1 / rate if rate else 0.0
        loop = asyncio.get_running_loop()
        write(head.encode() + _chunk(answer.first()))
        event, due_s = _chunk(answer.event()), loop.time()
        for number in range(answer.tokens):
            if number or not answer.computed:  # computing a prompt gives its first token
                due_s += interval_s
            # also without a pace others get their turn between two events, so that each travels by itself
            await asyncio.sleep(max(0.0, due_s - loop.time()) if interval_s else 0)
            if not self._room.is_set():
                await self._room.wait()
            write(event)
        self._count(answer)
        last = _chunk(answer.last()) + (_chunk(answer.usage_event()) if wants_usage else b"")
        write(last + _chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n")

    def _count(self, answer: _NullAnswer) -> None:
        self._engine.prompt_tokens += answer.prompt_tokens
        self._engine.output_tokens += answer.tokens

    def _answer(self, status: int, value: dict[str, Any], request_id: str = "") -> None:
        assert self._transport is not None
        body = msgspec.json.encode(value)
        named = f"x-request-id: {request_id}\r\n" if request_id else ""
        head = f"HTTP/1.1 {status} X\r\ncontent-type: application/json\r\n{named}content-length: {len(body)}\r\n\r\n"
        self._transport.write(head.encode() + body)


class _NullAnswer:
    """The parts of one answer, shaped like vLLM's."""

    def __init__(
        self, chat: bool, model: str, request_id: str, tokens: int, prompt_tokens: int, *, computed: bool
    ) -> None:
        self.tokens = tokens
        self.computed = computed  # the prompt took its time
        self._chat = chat
        self.prompt_tokens = prompt_tokens
        kind = "chat.completion" if chat else "text_completion"
        self._frame = {"id": f"{'chatcmpl' if chat else 'cmpl'}-{request_id}", "created": 0, "model": model}
        self._kinds = (kind, f"{kind}.chunk" if chat else kind)

    def first(self) -> bytes:
        return self._event({"role": "assistant", "content": ""}, None) if self._chat else b""

    def event(self) -> bytes:
        return self._event({"content": _TEXT}, None)

    def last(self) -> bytes:
        return self._event({"content": ""}, "length")

    def usage_event(self) -> bytes:
        said: dict[str, object] = {"choices": [], "usage": self._usage()}
        if self.computed:  # from such a report the conductor learns how fast the engine is
            said["kv_transfer_params"] = {"mooncache": {"v": 1, "outcome": "miss", "asked_tokens": 0}}
        return _sse({**self._frame, "object": self._kinds[1], **said})

    def whole(self) -> dict[str, Any]:
        text = _TEXT * self.tokens
        said = {"message": {"role": "assistant", "content": text}} if self._chat else {"text": text}
        choice = {"index": 0, **said, "logprobs": None, "finish_reason": "length"}
        return {**self._frame, "object": self._kinds[0], "choices": [choice], "usage": self._usage()}

    def _event(self, delta: dict[str, object], finish: str | None) -> bytes:
        said: dict[str, object] = {"delta": delta} if self._chat else {"text": delta["content"]}
        choice = {"index": 0, **said, "logprobs": None, "finish_reason": finish}
        return _sse({**self._frame, "object": self._kinds[1], "choices": [choice]})

    def _usage(self) -> dict[str, object]:
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.tokens,
            "total_tokens": self.prompt_tokens + self.tokens,
            "prompt_tokens_details": {"cached_tokens": 0},
        }


def _sse(value: dict[str, object]) -> bytes:
    return b"data: " + msgspec.json.encode(value) + b"\n\n"


def _chunk(data: bytes) -> bytes:
    return f"{len(data):x}\r\n".encode() + data + b"\r\n" if data else b""


def _prompt_tokens(fields: dict[str, Any]) -> int:
    """A guess from the length, or the number of ids: nothing is tokenised here."""
    prompt = fields.get("prompt")
    if isinstance(prompt, list) and prompt and isinstance(prompt[0], int):
        return len(prompt)
    texts = (
        [prompt]
        if isinstance(prompt, str)
        else [str(one.get("content")) for one in fields.get("messages", [])]
    )
    return sum(map(len, texts)) // 4


def _error(message: str, code: int) -> dict[str, object]:
    return {"error": {"message": message, "type": "invalid_request_error", "param": None, "code": code}}


def _parse_head(head: bytes) -> tuple[str, str, dict[str, str]]:
    first, *lines = head.decode("latin-1").split("\r\n")
    method, target, *_ = [*first.split(" "), "", ""]
    pairs = (line.partition(":") for line in lines)
    return method, target.partition("?")[0], {name.lower(): value.strip() for name, _, value in pairs}


async def _run(options: NullEngineOptions, port: int) -> None:
    engine = NullEngine(options)
    ended = asyncio.Event()
    loop = asyncio.get_running_loop()

    def wait_for_end() -> None:
        sys.stdin.buffer.read()
        loop.call_soon_threadsafe(ended.set)

    threading.Thread(target=wait_for_end, daemon=True).start()
    await engine.start(port=port)
    sys.stdout.write(json.dumps({"ok": True, "port": engine.port}) + "\n")
    sys.stdout.flush()
    await ended.wait()
    await engine.close()


def main() -> int:
    """Serve until the input ends."""
    parser = argparse.ArgumentParser(prog="mooncache.bench.null_engine", description=__doc__)
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--model", default="null")
    parser.add_argument("--key", default="")
    parser.add_argument("--events-per-s", type=float, default=0.0)
    parser.add_argument("--first-token-s", type=float, default=0.0)
    parser.add_argument("--tokens", type=int, default=16)
    parser.add_argument("--prompt-tokens-per-s", type=float, default=0.0)
    given = parser.parse_args()
    options = NullEngineOptions(
        given.model,
        given.key,
        given.events_per_s,
        given.first_token_s,
        given.tokens,
        given.prompt_tokens_per_s,
    )
    import uvloop

    uvloop.run(_run(options, given.port))
    return 0


if __name__ == "__main__":
    sys.exit(main())
