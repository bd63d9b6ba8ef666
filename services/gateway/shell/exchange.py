"""One HTTP request and its answer: body in, answer or stream out, and the knowledge of whether the client is there.

Plain ASGI, because a gateway has to know three things that frameworks hide: when the client left, how long a write
takes, and that each event is on the wire before the next is awaited.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, MutableMapping
from enum import Enum, auto
from types import TracebackType
from typing import Any, Final, Self

from mooncache.accounts.core.usage import WorkClass
from mooncache.errors import DeadlineExceeded, InvalidArgument, LimitExceeded
from mooncache.gateway.core import faults
from mooncache.gateway.core.bodies import BodyLimit, Budget
from mooncache.gateway.core.body import too_large
from mooncache.gateway.core.faults import Fault
from mooncache.gateway.shell.keyring import Caller

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]
# A client that sends or takes no byte for so long counts as gone.
SILENCE_MAX_S: Final = 60.0
JSON: Final = "application/json"
EVENTS: Final = "text/event-stream; charset=utf-8"


class ClientGone(Exception):  # noqa: N818  (not an error)
    """The client closed its connection or takes no bytes."""


class StreamEnd(Enum):
    """The two ends of a stream."""

    CLIENT = auto()
    ENGINE = auto()


class Exchange:
    """One HTTP request and its answer.

    Attributes: `headers` of the request, lower case; `reply_headers` are added to whatever answer follows; `caller`
    once authenticated; `begun` once the head of the answer is out; `gone` once the client has left;
    `notes` go into the log line of the request; `body_budget` counts the body's bytes until `release_body`;
    `entered` has the holders of limits among whose requests it counts; `offline` of a batch, which takes what is
    idle; `answered` once all of the answer is on its way; `ended_by` once its key has ended, with what is answered
    then.
    """

    def __init__(
        self, scope: Scope, receive: Receive, send: Send, *, request_id: str, started_s: float
    ) -> None:
        self.scope = scope
        self.method: str = scope["method"]
        self.path: str = scope["path"]
        self.headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
        self.request_id = request_id
        self.started_s = started_s
        self.caller: Caller | None = None
        self.reply_headers: dict[str, str] = {"x-request-id": request_id}
        self.status = 0
        self.begun = False
        self.gone = False
        self.unread = False
        self.notes: dict[str, Any] = {}
        self.entered: list[str] = []
        self.offline = False
        self.answered = False
        self.ended_by: Fault | None = None
        self.body_budget: Budget | None = None
        self._body_bytes = 0
        self._receive, self._send = receive, send
        self._watch: asyncio.Task[None] | None = None

    @property
    def work_class(self) -> WorkClass:
        """Under which class its tokens are metered."""
        return WorkClass.OFFLINE if self.offline else WorkClass.ONLINE

    def require_caller(self) -> Caller:
        """Who sent the request; for what runs after authentication only."""
        if self.caller is None:
            raise RuntimeError("the request was not authenticated")
        return self.caller

    # in

    async def read_body(self, limit: int, timeout_s: float, whole_s: float = float("inf")) -> list[bytes]:
        """The whole body in the pieces in which it came: to join large ones would stop all streams.

        From here on a client that leaves cancels the current task. Raises what `body_parts` raises.
        """
        return [part async for part in self.body_parts(limit, timeout_s, whole_s)]

    async def body_parts(
        self, limit: int, timeout_s: float, whole_s: float = float("inf")
    ) -> AsyncIterator[bytes]:
        """The body, piece by piece. After the last one a client that leaves cancels the current task.

        Raises:
            Refusal: 413 beyond `limit` bytes, 408 when nothing comes for `timeout_s` or the end not within `whole_s`,
                429 when other bodies leave no room for this one.
            ClientGone: it left in the middle.
        """
        length = self.headers.get("content-length", "")
        self.unread = True  # until all is read the connection cannot be used again
        if length.isdigit():
            if int(length) > limit:
                raise too_large(limit)
            self._count_body(int(length))  # is there room at all?
            self.release_body()
        if self.headers.get("content-encoding", "identity").lower() not in ("identity", ""):
            raise faults.refuse(InvalidArgument("The body is compressed; send it uncompressed."), status=415)
        size = 0
        until_s = asyncio.get_running_loop().time() + whole_s
        while True:
            try:
                async with asyncio.timeout_at(min(until_s, asyncio.get_running_loop().time() + timeout_s)):
                    message = await self._receive()
            except TimeoutError:
                error = DeadlineExceeded("The request's body did not come in time.")
                raise faults.refuse(error, status=408) from None
            if message["type"] == "http.disconnect":
                self.gone = True
                raise ClientGone
            part = message.get("body", b"")
            size += len(part)
            if size > limit:
                raise too_large(limit)
            self._count_body(len(part))
            yield part
            if not message.get("more_body", False):
                break
        self.unread = False
        task = asyncio.current_task()
        assert task is not None
        self._watch = asyncio.create_task(self._until_gone(task))

    async def discard_body(self, bytes_max: int, timeout_s: float) -> None:
        """Let the rest of a refused body come in: its sender reads the answer then, not a broken connection."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                while self.unread and bytes_max > 0:
                    message = await self._receive()
                    bytes_max -= len(message.get("body", b""))
                    self.unread = message.get("more_body", False)

    def _count_body(self, size: int) -> None:
        if self.body_budget is None:
            return
        tenant = self.caller.tenant if self.caller is not None else ""
        short = self.body_budget.take(tenant, size)
        if short is not None:
            whose = "your tenant's requests" if short is BodyLimit.TENANT else "all requests"
            raise faults.refuse(
                LimitExceeded(f"The bodies of {whose} that are held leave no room for this one.")
            )
        self._body_bytes += size

    def release_body(self) -> None:
        """The body is no longer needed. Harmless to repeat."""
        if self.body_budget is not None:
            size, self._body_bytes = self._body_bytes, 0
            self.body_budget.give(self.caller.tenant if self.caller is not None else "", size)

    async def _until_gone(self, task: asyncio.Task[Any]) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass
        if not task.done():
            self.gone = True
            task.cancel()

    def unwatch(self) -> None:
        """The answer is complete: a client that leaves now has all it asked for."""
        if self._watch is not None:
            self._watch.cancel()
            self._watch = None

    # out

    async def reply(
        self, status: int, body: bytes, content_type: str = JSON, headers: Iterable[tuple[str, str]] = ()
    ) -> None:
        """A whole answer."""
        self.unwatch()
        self.answered = True
        length = ("content-length", str(len(body)))
        await self._begin(status, content_type, (length, *headers))
        content = b"" if self.method == "HEAD" else body
        await self._send({"type": "http.response.body", "body": content, "more_body": False})

    async def begin_stream(self, content_type: str = EVENTS) -> None:
        """The head of a stream: nothing on the way may hold it back. Does nothing when it has begun."""
        if not self.begun:
            await self._begin(200, content_type, (("cache-control", "no-cache"), ("x-accel-buffering", "no")))

    async def write(self, data: bytes) -> None:
        """One piece of a stream; returns when the connection takes more."""
        await self._send({"type": "http.response.body", "body": data, "more_body": True})

    async def end(self) -> None:
        """The end of a stream."""
        self.unwatch()
        self.answered = True
        await self._send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _begin(self, status: int, content_type: str, headers: Iterable[tuple[str, str]]) -> None:
        self.status, self.begun = status, True
        found = {"content-type": content_type, **self.reply_headers, **dict(headers)}
        if self.unread:
            found["connection"] = "close"
        pairs = [
            (name.encode("latin-1"), value.encode("latin-1", "replace")) for name, value in found.items()
        ]
        await self._send({"type": "http.response.start", "status": status, "headers": pairs})


class Watchdog:
    """Ends a task that waits too long, at the price of two assignments per step instead of a timer per step.

    `expect` says for whom the current task now waits; beyond its limit the task is cancelled and `fired` names them.
    Use as `with Watchdog() as dog`; the caller turns the CancelledError into an error of its own when `fired` is set.
    """

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        task = asyncio.current_task()
        assert task is not None
        self._task = task
        self._whom: StreamEnd | None = None
        self._until_s = float("inf")
        self._timer: asyncio.TimerHandle | None = None
        self._timer_s = float("inf")
        self.fired: StreamEnd | None = None

    def expect(self, whom: StreamEnd, limit_s: float) -> None:
        """From now on `whom` has to act within `limit_s`."""
        self._whom = whom
        self._until_s = self._loop.time() + limit_s
        if self._until_s < self._timer_s:
            self._arm()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def _arm(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer_s = self._until_s
        self._timer = self._loop.call_at(self._until_s, self._check)

    def _check(self) -> None:
        self._timer, self._timer_s = None, float("inf")
        if self._loop.time() < self._until_s:
            self._arm()  # it went on in the meantime
        else:
            self.fired = self._whom
            self._task.cancel()
