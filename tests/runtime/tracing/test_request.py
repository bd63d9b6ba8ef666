"""One request through a whole cluster: one trace with right parents, one id in every log."""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from mooncache.cluster.embedded import ClusterSettings, EmbeddedCluster
from mooncache.cluster.settings import missing_modules
from tests.docs.blocks import block
from tests.runtime.tracing.collector import Collector, Seen

pytestmark = pytest.mark.timeout(300)

PARENT_ID = "00f067aa0ba902b7"
SCHEDULE = "mooncache.v1.ConductorService/Schedule"
ATTEMPTS = 5


@pytest.fixture(scope="module")
def module_collector() -> Iterator[Collector]:
    pytest.importorskip("opentelemetry.sdk", reason="the extra otel is not installed")
    made = Collector()
    made.start()
    yield made
    made.stop()


@pytest.fixture(scope="module")
def cluster(
    module_collector: Collector, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[EmbeddedCluster]:
    if missing := missing_modules("hf"):
        pytest.skip(f"the small engine needs {', '.join(missing)}: pip install 'mooncache[hf]'")
    shown = block("docs/observability.md", "MOONCACHE_TRACING_ENDPOINT=").text
    variable, _, rest = shown.partition("=")
    assert rest == "http://127.0.0.1:4317 mooncache up\n"
    settings = ClusterSettings(
        state_dir=tmp_path_factory.mktemp("traced"),
        engine="hf",
        capacity_bytes=256 << 20,
        port=0,
        conductor_port=0,
        gateway_port=0,
        log_level="debug",
        extra_env=(
            ("OMP_NUM_THREADS", "1"),
            (variable, module_collector.endpoint),
            ("MOONCACHE_CONDUCTOR_ADMISSION_ENABLED", "false"),
            ("MOONCACHE_CONDUCTOR_INLINE_TOKENS_MAX", "16"),  # so that decode loads what prefill computed
        ),
    )
    made = EmbeddedCluster(settings)
    made.start(180)
    yield made
    made.stop()


def ask(cluster: EmbeddedCluster, text: str, request_id: str, headers: dict[str, str]) -> dict[str, Any]:
    body = {
        "model": cluster.describe_instances()[0]["model"],
        "messages": [{"role": "user", "content": text}],
        "max_tokens": 8,
        "temperature": 0,
    }
    key = cluster.demo_key_path.read_text(encoding="ascii").strip()
    request = urllib.request.Request(
        f"{cluster.layout.gateway_url}/v1/chat/completions",
        data=json.dumps(body).encode(),
        headers={
            "Authorization": f"Bearer {key}",
            "Content-Type": "application/json",
            "X-Request-Id": request_id,
            **headers,
        },
    )
    with urllib.request.urlopen(request, timeout=90) as response:
        return dict(json.load(response))


@dataclass(frozen=True)
class Traced:
    """One request with both legs and its spans."""

    trace_id: str
    request_id: str
    spans: list[Seen]


@pytest.fixture(scope="module")
def traced(cluster: EmbeddedCluster, module_collector: Collector) -> Traced:
    """On a machine that is busy with other things a decode engine may stop waiting and compute by itself, which is
    right but has no load; then another prompt is sent."""
    for number in range(ATTEMPTS):
        trace_id, request_id = f"4bf92f3577b34da6a3ce929d0e0e47{number:02x}", f"tracing-test-request-{number}"
        text = f"Request {number} goes through all the services of the cluster. " * 20
        ask(cluster, text, request_id, {"traceparent": f"00-{trace_id}-{PARENT_ID}-01"})
        spans = module_collector.wait_for(lambda spans, wanted=trace_id: _ended(spans, wanted), 60)  # type: ignore[misc]
        spans = [span for span in spans if span.trace_id == trace_id]
        if any(span.name == "kvcache.load" for span in spans):
            return Traced(trace_id, request_id, spans)
    raise AssertionError(f"no decode leg of {ATTEMPTS} loaded its blocks: {spans}")


def _ended(spans: list[Seen], trace_id: str) -> bool:
    """Whether everything that surely comes has come; an engine's spans are sent in the order of their ends."""
    found = [span.name for span in spans if span.trace_id == trace_id]
    if "gateway.request" in found and "gateway.prefill" not in found:
        return True  # no prefill leg: the conductor had not reached the pool yet
    once = {"gateway.request", "gateway.prefill", "gateway.decode", "kvcache.save", "pool.match"}
    return once <= set(found) and found.count(SCHEDULE) == 2 and found.count("engine.request") == 2


def test_one_trace_from_the_client_to_the_store(traced: Traced) -> None:
    by_id = {span.span_id: span for span in traced.spans}

    def ancestors(span: Seen) -> list[str]:
        found = []
        while span.parent_id in by_id:
            span = by_id[span.parent_id]
            found.append(span.name)
        assert span.name == "gateway.request", (span.name, found)
        return found

    root = next(span for span in traced.spans if span.name == "gateway.request")
    assert (root.parent_id, root.service) == (PARENT_ID, "mooncache-gateway")
    asked = next(span for span in traced.spans if span.name == SCHEDULE and span.kind == "server")
    assert asked.service == "mooncache-conductor"
    assert ancestors(asked) == [SCHEDULE, "gateway.request"]
    match = next(span for span in traced.spans if span.name == "pool.match")
    assert ancestors(match) == [SCHEDULE, SCHEDULE, "gateway.request"]
    engines = [span for span in traced.spans if span.name == "engine.request"]
    assert {span.service for span in engines} == {"mooncache-engine"}
    assert sorted(ancestors(span)[0] for span in engines) == ["gateway.decode", "gateway.prefill"]
    saves = [span for span in traced.spans if span.name == "kvcache.save"]
    loads = [span for span in traced.spans if span.name == "kvcache.load"]
    assert any(ancestors(span)[:2] == ["engine.request", "gateway.prefill"] for span in saves)
    assert any(ancestors(span)[:2] == ["engine.request", "gateway.decode"] for span in loads)
    assert sum(span.attributes["kvcache.bytes"] for span in loads) > 0
    assert all(span.attributes["kvcache.blocks"] > 0 for span in (*saves, *loads))


def test_spans_say_nothing_about_the_text_or_the_caller(traced: Traced, cluster: EmbeddedCluster) -> None:
    text = repr(traced.spans)
    assert "through all the services" not in text
    assert "mct1." not in text
    assert "demo" not in text


def test_one_request_id_in_every_log(traced: Traced, cluster: EmbeddedCluster) -> None:
    assert traced.spans
    logs = list((cluster.state_dir / "logs").glob("*.log"))
    found = {path.name: _lines_with(path, traced.request_id) for path in logs}
    named = {name.removesuffix(".log") for name, lines in found.items() if lines}
    assert {"gateway", "conductor", "prefill-1.engine", "decode-1.engine"} <= named, sorted(found)
    lines = [line for lines in found.values() for line in lines]
    assert {line["trace_id"] for line in lines if "trace_id" in line} == {traced.trace_id}
    for name in ("gateway", "conductor", "prefill-1.engine", "decode-1.engine"):
        assert any("trace_id" in line for line in found[f"{name}.log"]), name


def test_background_calls_begin_no_traces(traced: Traced, module_collector: Collector) -> None:
    assert traced.spans
    names = {span.name for span in module_collector.spans if span.trace_id != traced.trace_id}
    quiet = ("Heartbeat", "ReportBlocks", "ReportInstance", "ListInstances", "WatchClusterMap")
    assert not [name for name in names if name.endswith(quiet)]


def _lines_with(path: Path, wanted: str) -> list[dict[str, Any]]:
    parse: Callable[[str], dict[str, Any]] = json.loads
    lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    return [parse(line) for line in lines if wanted in line and line.startswith("{")]
