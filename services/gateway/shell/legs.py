"""The two kinds of HTTP leg, each a coroutine that runs as a task of its own while its request lives."""

from __future__ import annotations

import asyncio
from dataclasses import asdict, dataclass, field
from typing import Any, Final, Generic, TypeVar

from mooncache.errors import EngineTimeout
from mooncache.gateway.core import usage
from mooncache.gateway.core.plan import LegPlan
from mooncache.gateway.core.sse import edit_answer
from mooncache.gateway.core.usage import TokenUsage
from mooncache.gateway.shell.engines import EngineAnswer, Engines
from mooncache.gateway.shell.exchange import Exchange
from mooncache.gateway.shell.relay import EngineStream
from mooncache.kvcache.leg_hint import CacheReport, LegRole
from mooncache.proto.v1 import conductor_pb2 as pb
from mooncache.runtime import tracing

_PREFILL_ANSWER_BYTES_MAX = 64 << 20
_ROLES: Final = {LegRole.PREFILL: pb.LEG_ROLE_PREFILL, LegRole.DECODE: pb.LEG_ROLE_DECODE}
Answer = TypeVar("Answer")


@dataclass(slots=True)
class LegRecord:
    """What happened on one leg, for `why`. Times are milliseconds since the gateway took the request."""

    leg: LegRole
    instance: str
    sent_ms: float
    ended_ms: float = 0.0
    code: str = ""
    usage: TokenUsage | None = None
    cache: CacheReport | None = None

    @property
    def cached_tokens(self) -> int | None:
        """Prompt tokens that the leg found in a cache."""
        return usage.cached_of_leg(self.usage, self.cache)

    def report(self) -> pb.LegReport:
        """As it is reported to the conductor."""
        return pb.LegReport(
            role=_ROLES[self.leg],
            instance_id=self.instance,
            sent_ms=self.sent_ms,
            ended_ms=self.ended_ms,
            code=self.code,
            usage=None if self.usage is None else pb.TokenUsage(**asdict(self.usage)),
            cache=None if self.cache is None else _cache_message(self.cache),
        )


def _cache_message(cache: CacheReport) -> pb.CacheReport:
    said = asdict(cache)
    if cache.held_tokens < 0:
        del said["held_tokens"]
    return pb.CacheReport(**said)


@dataclass(slots=True)
class Opened:
    """A decode leg whose answer has begun: a whole `body`, or a `source` with its `first` events."""

    record: LegRecord
    answer: EngineAnswer
    body: bytes = b""
    source: EngineStream | None = None
    first: bytes = b""
    closed: bool = field(default=False)


@dataclass(slots=True, eq=False)
class Leg(Generic[Answer]):
    """A leg under way: what is noted of it, and the task that ends with its answer or its error."""

    role: LegRole
    record: LegRecord
    task: asyncio.Task[Answer]

    @property
    def has_ended(self) -> bool:
        """Whether its answer or its error is there."""
        return self.task.done()

    def cancel(self) -> None:
        """Give it up; its connection closes, so its engine stops."""
        self.task.cancel()
        self.task.add_done_callback(_forget)


def _forget(task: asyncio.Task[Any]) -> None:
    """Take a cancelled leg's result, so that nothing complains and an answer that came too late is closed."""
    if task.cancelled() or task.exception() is not None:
        return
    result = task.result()
    if isinstance(result, Opened):
        result.answer.close()


async def run_prefill(
    engines: Engines, leg: LegPlan, body: bytes, record: LegRecord, *, request_id: str, limit_s: float
) -> None:
    """Have a prompt computed; returns when its blocks are made, with what the engine said in `record`.

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
    _, record.usage, record.cache = edit_answer(data)


async def open_decode(
    engines: Engines,
    leg: LegPlan,
    path: str,
    body: bytes,
    record: LegRecord,
    exchange: Exchange,
    *,
    stream: bool,
    limit_s: float,
) -> Opened:
    """Send the request to the engine that generates; returns when there is something to tell the client.

    Raises:
        EngineUnavailable, EngineFailed, EngineTimeout: what went wrong. Refusal: the engine refuses the request.
    """
    answer: EngineAnswer | None = None
    try:
        # The span ends with the first token; the engine's own goes on to the last.
        with tracing.span("gateway.decode", kind="client", instance=leg.instance_id):
            async with asyncio.timeout(limit_s):
                answer = await engines.post(leg.url, path, body, exchange.request_id)
                if not stream:
                    return Opened(record, answer, body=await answer.read_all())
                source = EngineStream(answer)
                return Opened(record, answer, source=source, first=await source.first(exchange))
    except TimeoutError:
        if answer is not None:
            answer.close()
        raise EngineTimeout(f"The engine did not answer within {limit_s:g} s.") from None
    except BaseException:
        if answer is not None:
            answer.close()
        raise
