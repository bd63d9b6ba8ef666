"""One trace per request across all processes: W3C trace context always, OpenTelemetry spans when asked for.

Idea: the trace context (trace id, span id, sampled or not) lives in one variable of our own, whether or not
anything is recorded. So a `traceparent` that came in always goes out again, log lines carry `trace_id`, and
an engine with tracing of its own joins the same trace. When `tracing.endpoint` is set and the extra `otel` is
installed, spans are recorded too and sent by OTLP in the background. Without that a nested `span`
is one shared object that does nothing.

Formats: W3C Trace Context, level 1 (https://www.w3.org/TR/trace-context/).
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Mapping, MutableMapping
from contextvars import ContextVar, Token
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Final, Literal

from mooncache.config import Config
from mooncache.runtime import otlp
from mooncache.runtime.logs import Event, get_logger
from mooncache.runtime.plain_structlog import structlog

TRACEPARENT: Final = "traceparent"
TRACESTATE: Final = "tracestate"
EXPORT_TIMEOUT_S: Final = 5.0
QUEUE_SPANS_MAX: Final = 8192  # beyond it spans are dropped, requests are not slowed
_TRACEPARENT: Final = re.compile(r"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?")
_TRACESTATE_CHARS_MAX: Final = 512

Kind = Literal["internal", "server", "client"]

log = get_logger(__name__)


@dataclass(frozen=True, slots=True)
class TraceContext:
    """Where in which trace something happens. Ids are lower-case hex: 32 and 16 characters."""

    trace_id: str
    span_id: str
    sampled: bool
    state: str = ""

    @property
    def traceparent(self) -> str:
        """The value of the header `traceparent`."""
        return f"00-{self.trace_id}-{self.span_id}-{'01' if self.sampled else '00'}"


_current: ContextVar[TraceContext | None] = ContextVar("mooncache_trace", default=None)


class _Recorder:
    """The OpenTelemetry side of a process: provider and tracer."""

    def __init__(self, provider: Any, api: Any) -> None:
        self.provider = provider
        self.api = api
        self.tracer = provider.get_tracer("mooncache")
        self.kinds: dict[str, Any] = {
            "internal": api.SpanKind.INTERNAL,
            "server": api.SpanKind.SERVER,
            "client": api.SpanKind.CLIENT,
        }

    def start(self, name: str, kind: Kind, parent: TraceContext | None, attributes: Mapping[str, Any]) -> Any:
        """Begin a span; its context is the child of `parent`, or a new trace."""
        api = self.api
        context = api.set_span_in_context(api.INVALID_SPAN)  # never what another library made current
        if parent is not None:
            flags = api.TraceFlags(api.TraceFlags.SAMPLED if parent.sampled else api.TraceFlags.DEFAULT)
            remote = api.SpanContext(int(parent.trace_id, 16), int(parent.span_id, 16), True, flags)
            context = api.set_span_in_context(api.NonRecordingSpan(remote))
        return self.tracer.start_span(name, context=context, kind=self.kinds[kind], attributes=attributes)


_recorder: list[_Recorder] = []  # at most one: what `setup` made
_ratio: list[float] = [1.0]  # share of new traces that carry the sampled flag


def setup(service: str, config: Config) -> bool:
    """Record the spans of this process under the name "mooncache-<service>"; True when they are recorded.

    Does nothing when `tracing.endpoint` is empty. When it is set and the extra `otel` is missing, says so in the
    log and records nothing. A second call replaces what the first one made.
    """
    shutdown()
    _ratio[0] = config.tracing.sample_ratio
    if not config.tracing.endpoint:
        return False
    try:
        from opentelemetry import trace as api
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
        from opentelemetry.sdk.trace.sampling import ParentBased, TraceIdRatioBased

        protocol = otlp.protocol_of(config.tracing.endpoint)
        exporter = otlp.exporter("traces", protocol, config.tracing.endpoint, EXPORT_TIMEOUT_S)
    except ImportError as error:
        log.warning(Event.TRACING_UNAVAILABLE, endpoint=config.tracing.endpoint, reason=str(error))
        return False
    provider = TracerProvider(
        resource=Resource.create({"service.name": f"mooncache-{service}", "service.namespace": "mooncache"}),
        sampler=ParentBased(TraceIdRatioBased(config.tracing.sample_ratio)),
        shutdown_on_exit=False,
    )
    provider.add_span_processor(
        BatchSpanProcessor(exporter, max_queue_size=QUEUE_SPANS_MAX, schedule_delay_millis=1000)
    )
    _recorder[:] = [_Recorder(provider, api)]
    log.info(Event.TRACING_ENABLED, endpoint=config.tracing.endpoint, ratio=config.tracing.sample_ratio)
    return True


def shutdown() -> None:
    """Send what is waiting, within a few seconds, and record nothing from now on. Blocks; safe to repeat."""
    if _recorder:
        _recorder.pop().provider.shutdown()


def flush(timeout_s: float = EXPORT_TIMEOUT_S) -> None:
    """Send what is waiting, without ending. Blocks for at most `timeout_s` seconds."""
    if _recorder:
        _recorder[0].provider.force_flush(int(timeout_s * 1e3))


def enabled() -> bool:
    """Whether spans are recorded."""
    return bool(_recorder)


def current() -> TraceContext | None:
    """The trace context here, None outside of any span."""
    return _current.get()


def trace_id() -> str:
    """The trace id here, "" outside of any span."""
    context = _current.get()
    return context.trace_id if context else ""


def recorded_id(context: TraceContext | None = None) -> str:
    """Id of a trace that can be opened later: that of `context`, or the one here; "" when none is recorded."""
    found = context or _current.get()
    return found.trace_id if found is not None and found.sampled and _recorder else ""


def inject(headers: MutableMapping[str, str]) -> MutableMapping[str, str]:
    """Add `traceparent` (and `tracestate`) of the current span to headers or metadata; returns the same mapping."""
    context = _current.get()
    if context is not None:
        headers[TRACEPARENT] = context.traceparent
        if context.state:
            headers[TRACESTATE] = context.state
    return headers


def extract(headers: Mapping[str, str]) -> TraceContext | None:
    """The caller's trace context, None when there is none or it is malformed (then it is ignored, as W3C says).

    Names are looked up in lower case, which is what gRPC, ASGI and Starlette give.
    """
    text = headers.get(TRACEPARENT) or ""
    found = _TRACEPARENT.fullmatch(text)
    if found is None or found[1] == "ff" or (found[1] == "00" and found[5]):
        return None
    if not int(found[2], 16) or not int(found[3], 16):
        return None
    state = headers.get(TRACESTATE) or ""
    if len(state) > _TRACESTATE_CHARS_MAX or not state.isprintable() or not state.isascii():
        state = ""
    return TraceContext(found[2], found[3], bool(int(found[4], 16) & 1), state)


class Span:
    """One piece of work; a context manager for sync and async code alike. Made by `span`.

    Entering makes it the current span of this task or thread, leaving ends it; an exception that passes marks
    it as failed with the exception's code (never its text, which may hold what a user wrote).
    """

    __slots__ = ("_context", "_logged", "_otel", "_token")

    def __init__(self, context: TraceContext, otel: Any, *, new_trace: bool) -> None:
        self._context = context
        self._otel = otel
        self._token: Token[TraceContext | None] | None = None
        self._logged: Mapping[str, Token[Any]] | None = {} if new_trace else None

    @property
    def context(self) -> TraceContext:
        """Trace context of this span, for code that carries it to another thread."""
        return self._context

    def set(self, **attributes: Any) -> None:
        """Add attributes: numbers, texts, booleans or lists of one of them. `__` in a name stands for a dot."""
        if self._otel is not None:
            self._otel.set_attributes(_dotted(attributes))

    def event(self, name: str, **attributes: Any) -> None:
        """Note that something happened now."""
        if self._otel is not None:
            self._otel.add_event(name, attributes=_dotted(attributes))

    def fail(self, code: str) -> None:
        """Mark the span as failed; `code` is an error's code, not a sentence with user data."""
        if self._otel is not None:
            from opentelemetry.trace import StatusCode

            self._otel.set_attribute("error.type", code)
            self._otel.set_status(StatusCode.ERROR, code)

    def end(self) -> None:
        """End a span that was never entered: for work that begins and ends in different places."""
        if self._otel is not None:
            self._otel.end()

    def __enter__(self) -> Span:
        self._token = _current.set(self._context)
        if self._logged is not None:
            self._logged = structlog.contextvars.bind_contextvars(trace_id=self._context.trace_id)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        token, self._token = self._token, None
        try:
            if token is not None:
                _current.reset(token)
            if self._logged:
                structlog.contextvars.reset_contextvars(**self._logged)
        except ValueError:
            pass  # left in another task than entered, as a generator may be: that task's variables are its own
        if error is not None and not isinstance(error, GeneratorExit):
            self.fail(str(getattr(error, "name", "") or type(error).__name__))
        if self._otel is not None:
            self._otel.end()


class _NoSpan(Span):
    """What a nested span is when nothing is recorded: the surrounding span's context simply stays."""

    __slots__ = ()

    def __init__(self) -> None:
        super().__init__(TraceContext("0" * 32, "0" * 16, False), None, new_trace=False)

    @property
    def context(self) -> TraceContext:
        return _current.get() or self._context

    def __enter__(self) -> Span:
        return self

    def __exit__(self, *_: object) -> None:
        return None


_NO_SPAN: Final = _NoSpan()


def span(
    name: str,
    parent_headers: Mapping[str, str] | None = None,
    *,
    kind: Kind = "internal",
    parent: TraceContext | None = None,
    root: bool = True,
    **attributes: object,
) -> Span:
    """A span to be entered with `with`.

    Args:
        name: what is done, from a fixed set: "gateway.request", "kvcache.load" ... never with ids in it.
        parent_headers: headers or metadata of a caller in another process; its context wins over the current one.
        kind: "server" for a call taken, "client" for a call made.
        parent: a context carried by hand, for example into a thread.
        root: begin a new trace where there is none; False makes the span only as part of a request's trace, so
            that heartbeats and reports record nothing.
        attributes: see Span.set.
    """
    came = parent or (extract(parent_headers) if parent_headers is not None else None)
    inherited = _current.get()
    above = came or inherited
    if above is None and not root:
        return _NO_SPAN
    if not _recorder:
        if came is None and inherited is not None:
            return _NO_SPAN
        return Span(came or _new_trace(), None, new_trace=True)
    otel = _recorder[0].start(name, kind, above, _dotted(attributes))
    made = otel.get_span_context()
    context = TraceContext(
        f"{made.trace_id:032x}",
        f"{made.span_id:016x}",
        made.trace_flags.sampled,
        above.state if above else "",
    )
    return Span(context, otel, new_trace=inherited is None or inherited.trace_id != context.trace_id)


def _new_trace() -> TraceContext:
    """A trace that begins here and is recorded by others at most."""
    made = secrets.token_hex(16)
    sampled = int(made[16:], 16) < _ratio[0] * (1 << 64)  # the rule of OpenTelemetry's TraceIdRatioBased
    return TraceContext(made, secrets.token_hex(8), sampled)


def _dotted(attributes: Mapping[str, object]) -> dict[str, object]:
    return {name.replace("__", "."): value for name, value in attributes.items() if value is not None}
