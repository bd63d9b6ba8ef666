"""Trace context in and out, with and without OpenTelemetry, and what a span leaves in logs."""

from __future__ import annotations

import asyncio
import builtins
import io
import json
from typing import Any

import pytest
import structlog
from hypothesis import given
from hypothesis import strategies as st

from mooncache.config import Config, load
from mooncache.errors import Overloaded
from mooncache.runtime import logs, tracing
from mooncache.runtime.logs import Event, get_logger
from tests.runtime.tracing.collector import Collector

PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
TRACE_ID = PARENT[3:35]


def test_a_callers_context_goes_through_unchanged_when_nothing_is_recorded() -> None:
    with tracing.span("x.request", {"traceparent": PARENT, "tracestate": "vendor=1"}):
        assert tracing.trace_id() == TRACE_ID
        with tracing.span("x.inner"):
            assert tracing.inject({}) == {"traceparent": PARENT, "tracestate": "vendor=1"}
    assert tracing.current() is None
    assert tracing.inject({}) == {}


def test_a_new_trace_can_be_joined_by_others() -> None:
    seen = set()
    for _ in range(20):
        with tracing.span("x.request", {}):
            headers = tracing.inject({})
            context = tracing.extract(headers)
            assert context is not None
            assert context.sampled
            assert context.traceparent == headers["traceparent"]
            seen.add(context.trace_id)
    assert len(seen) == 20


def test_the_ratio_decides_about_new_traces_only(config: Config) -> None:
    none = load(env={}, overrides={"cluster.state_dir": config.cluster.state_dir, "tracing.sample_ratio": 0})
    tracing.setup("x", none)
    try:
        with tracing.span("x.request") as span:
            assert not span.context.sampled
        with tracing.span("x.request", {"traceparent": PARENT}) as span:
            assert span.context.sampled
    finally:
        tracing.setup("x", config)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "garbage",
        PARENT.upper(),
        PARENT[:-1],
        PARENT + "-more",
        "ff" + PARENT[2:],
        PARENT.replace(TRACE_ID, "0" * 32),
        PARENT.replace("b7ad6b7169203331", "0" * 16),
        PARENT + "\n",
    ],
)
def test_malformed_contexts_are_as_if_absent(text: str) -> None:
    assert tracing.extract({"traceparent": text}) is None
    with tracing.span("x.request", {"traceparent": text}) as span:
        assert span.context.trace_id != TRACE_ID


def test_a_later_version_with_more_fields_is_understood() -> None:
    context = tracing.extract({"traceparent": "01" + PARENT[2:] + "-what-comes-later"})
    assert context is not None
    assert context.traceparent == PARENT


@pytest.mark.parametrize("state", ["x" * 600, "a=\x01", "a=ü"])
def test_a_strange_tracestate_is_not_passed_on(state: str) -> None:
    context = tracing.extract({"traceparent": PARENT, "tracestate": state})
    assert context is not None
    assert context.state == ""


@given(st.text(max_size=80))
def test_no_header_breaks_it(text: str) -> None:
    context = tracing.extract({"traceparent": text})
    assert context is None or context.traceparent.startswith("00-")


def test_without_a_request_nothing_begins() -> None:
    with tracing.span("x.heartbeat", {}, root=False):
        assert tracing.current() is None
        assert tracing.inject({}) == {}


async def test_tasks_do_not_mix() -> None:
    met = asyncio.Barrier(2)

    async def request() -> tuple[str, str]:
        with tracing.span("x.request", {}):
            before = tracing.trace_id()
            await met.wait()
            return before, tracing.trace_id()

    (a, after_a), (b, after_b) = await asyncio.gather(request(), request())
    assert (a, b) == (after_a, after_b)
    assert a != b


def test_log_lines_carry_the_trace() -> None:
    stream = io.StringIO()
    logs.setup("x", log_format="json", stream=stream)
    try:
        log = get_logger("test")
        with tracing.span("x.request", {"traceparent": PARENT}):
            log.info(Event.SERVICE_READY)
            with tracing.span("x.inner"):
                log.info(Event.SERVICE_READY)
        log.info(Event.SERVICE_READY)
    finally:
        logs.reset()
    lines = [json.loads(line) for line in stream.getvalue().splitlines()]
    assert [line.get("trace_id") for line in lines] == [TRACE_ID, TRACE_ID, None]
    assert "trace_id" not in structlog.contextvars.get_contextvars()


async def test_a_generator_that_ends_elsewhere_breaks_nothing() -> None:
    async def stream() -> Any:
        with tracing.span("x.stream", {"traceparent": PARENT}):
            yield 1
            yield 2

    made = stream()
    await asyncio.create_task(anext(made))
    await asyncio.create_task(made.aclose())
    assert tracing.current() is None


def test_without_opentelemetry_it_says_so_and_goes_on(
    config: Config, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    real = builtins.__import__

    def refuse(name: str, *arguments: Any, **options: Any) -> Any:
        if name.startswith("opentelemetry"):
            raise ImportError("No module named 'opentelemetry'")
        return real(name, *arguments, **options)

    monkeypatch.setattr(builtins, "__import__", refuse)
    wanted = load(
        env={},
        overrides={"cluster.state_dir": config.cluster.state_dir, "tracing.endpoint": "http://127.0.0.1:9"},
    )
    assert not tracing.setup("x", wanted)
    assert not tracing.enabled()
    assert "tracing.unavailable" in capsys.readouterr().err
    with tracing.span("x.request", {"traceparent": PARENT}) as span:
        span.set(a=1)
        span.event("e")
        span.fail("CODE")
        assert tracing.trace_id() == TRACE_ID


def test_spans_arrive_with_names_parents_and_attributes(traced: Config, collector: Collector) -> None:
    assert tracing.setup("gateway", traced)
    with (
        tracing.span("gateway.request", {"traceparent": PARENT}, kind="server", http__method="POST") as outer,
        tracing.span("kvcache.load") as inner,
    ):
        inner.set(kvcache__bytes=4096, nothing=None)
    tracing.flush()
    spans = {span.name: span for span in collector.wait_for(lambda spans: len(spans) >= 2)}
    request, load_span = spans["gateway.request"], spans["kvcache.load"]
    assert request.service == "mooncache-gateway"
    assert (request.trace_id, request.parent_id, request.kind) == (TRACE_ID, PARENT[36:52], "server")
    assert (load_span.trace_id, load_span.parent_id) == (TRACE_ID, request.span_id)
    assert request.span_id == outer.context.span_id
    assert request.attributes == {"http.method": "POST"}
    assert load_span.attributes == {"kvcache.bytes": 4096}


def test_spans_go_over_http_to_an_address_with_a_path(
    config: Config, collector: Collector, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("opentelemetry.exporter.otlp.proto.http", reason="OTLP over HTTP is not installed")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", "authorization=Bearer%20key")
    overrides = {"cluster.state_dir": config.cluster.state_dir, "tracing.endpoint": collector.http_endpoint}
    assert tracing.setup("here", load(env={}, overrides=overrides))
    with tracing.span("x.request", {"traceparent": PARENT}, kind="server", some__count=2):
        pass
    tracing.flush()
    (span,) = collector.wait_for(bool)
    assert (span.service, span.name, span.kind) == ("mooncache-here", "x.request", "server")
    assert (span.trace_id, span.parent_id) == (TRACE_ID, PARENT[36:52])
    assert span.attributes == {"some.count": 2}
    assert collector.http.headers["authorization"] == "Bearer key"


def test_failures_are_marked_by_code_and_never_by_text(traced: Config, collector: Collector) -> None:
    tracing.setup("gateway", traced)
    with pytest.raises(Overloaded), tracing.span("a"):
        raise Overloaded("the user's own words")
    with pytest.raises(KeyError), tracing.span("b"):
        raise KeyError("the user's own words")
    tracing.shutdown()
    spans = {span.name: span for span in collector.wait_for(lambda spans: len(spans) >= 2)}
    assert all(span.failed for span in spans.values())
    assert spans["a"].attributes == {"error.type": "OVERLOADED"}
    assert spans["b"].attributes == {"error.type": "KeyError"}
    assert "own words" not in repr(spans)


def test_a_caller_who_does_not_record_is_respected(traced: Config, collector: Collector) -> None:
    tracing.setup("gateway", traced)
    with tracing.span("unsampled", {"traceparent": PARENT[:-2] + "00"}) as span:
        assert not span.context.sampled
        assert span.context.trace_id == TRACE_ID
    with tracing.span("sampled"):
        pass
    tracing.shutdown()
    assert [span.name for span in collector.wait_for(bool)] == ["sampled"]


def test_a_collector_that_is_gone_harms_nobody(traced: Config, collector: Collector) -> None:
    collector.stop()
    tracing.setup("gateway", traced)
    for _ in range(100):
        with tracing.span("x.request", {}):
            pass
    tracing.flush(0.2)
