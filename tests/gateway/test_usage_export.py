"""Usage by OpenTelemetry: a real gateway sends what its meter counted to a real OTLP server; when it sends nothing."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import aiohttp
import grpc
import pytest
from aiohttp import web

from mooncache.accounts.core.usage import OTHER, UsageCounts, UsageField, WorkClass
from mooncache.gateway.core.usage_series import UsageSeries
from mooncache.gateway.shell import usage_export
from mooncache.gateway.shell.usage_export import endpoint_of, open_usage_export
from mooncache.prices.core.usage_bill import money_of
from tests.gateway.stand_in import MODEL, FakeEngine, running
from tests.gateway.test_usage import Tally, ask, used
from tests.otlp_http import OtlpHttpReceiver

_SERVICE = "opentelemetry.proto.collector.metrics.v1.MetricsService"


async def broken(_engine: FakeEngine, _request: web.Request, _body: dict[str, Any]) -> web.Response:
    return web.json_response({"error": {"message": "no"}}, status=400)


class MetricsServer:
    """An OTLP receiver, by gRPC and HTTP: keeps the newest value of each series, and the resource they came from."""

    def __init__(self) -> None:
        from opentelemetry.proto.collector.metrics.v1 import metrics_service_pb2 as pb

        self._answer = pb.ExportMetricsServiceResponse()
        self.values: dict[tuple[str, ...], float] = {}
        self.units: dict[str, str] = {}
        self.resource: dict[str, str] = {}
        self.monotonic = True
        self.lock = threading.Lock()
        handler = grpc.unary_unary_rpc_method_handler(
            self._export,
            request_deserializer=pb.ExportMetricsServiceRequest.FromString,
            response_serializer=lambda message: message.SerializeToString(),
        )
        self._server = grpc.server(ThreadPoolExecutor(2))
        self._server.add_generic_rpc_handlers(
            (grpc.method_handlers_generic_handler(_SERVICE, {"Export": handler}),)
        )
        self.endpoint = f"http://127.0.0.1:{self._server.add_insecure_port('127.0.0.1:0')}"
        self._server.start()
        self._http = OtlpHttpReceiver(
            "/v1/metrics", pb.ExportMetricsServiceRequest, lambda request: self._export(request, None)
        )
        self.http_address = self._http.address

    def stop(self) -> None:
        self._http.stop()
        self._server.stop(1.0).wait(5.0)

    def _export(self, request: Any, _context: Any) -> Any:
        with self.lock:
            for resource in request.resource_metrics:
                self.resource = {each.key: each.value.string_value for each in resource.resource.attributes}
                for scope in resource.scope_metrics:
                    for metric in scope.metrics:
                        self._take(metric)
        return self._answer

    def _take(self, metric: Any) -> None:
        self.units[metric.name] = metric.unit
        self.monotonic &= metric.sum.is_monotonic
        for point in metric.sum.data_points:
            named = {each.key: each.value.string_value for each in point.attributes}
            key = (metric.name, *(named[name] for name in ("tenant", "model", "outcome") if name in named))
            self.values[key] = getattr(point, point.WhichOneof("value"))


@pytest.fixture
def receiver() -> Iterator[MetricsServer]:
    pytest.importorskip("opentelemetry.sdk", reason="the extra otel is not installed")
    server = MetricsServer()
    yield server
    server.stop()


def test_series_are_bounded_and_grow() -> None:
    series = UsageSeries(series_max=3)
    for number in range(6):
        series.add(f"t{number}", "m", UsageCounts(2, 1, 0, 10, 4, 5, 1), 0.5)
        series.check()
    series.add("t0", "m", UsageCounts(1, 0, 1), 0.0)
    rows = series.rows()
    assert set(rows) == {("t0", "m"), ("t1", "m"), (OTHER, OTHER)}
    assert rows["t0", "m"] == (1, 1, 1, 10, 4, 5, 1, 0.5)
    assert rows[OTHER, OTHER] == (4, 4, 0, 40, 16, 20, 4, 2.0)


def test_the_setting_then_the_standard_variables() -> None:
    both = {
        "OTEL_EXPORTER_OTLP_ENDPOINT": "http://all",
        "OTEL_EXPORTER_OTLP_METRICS_ENDPOINT": "http://metrics",
    }
    assert endpoint_of("", {}) == ""
    assert endpoint_of("http://here", both) == "http://here"
    assert endpoint_of("", both) == "http://metrics"
    assert endpoint_of("", {**both, "OTEL_METRICS_EXPORTER": "none"}) == ""
    assert endpoint_of("", {**both, "OTEL_SDK_DISABLED": "true"}) == ""


def test_what_cannot_be_is_said_and_costs_no_gateway(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[dict[str, Any]] = []
    monkeypatch.setattr(usage_export.log, "warning", lambda _event, **fields: said.append(fields))
    assert open_usage_export("", "w", None) is None
    assert not said
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:1")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_PROTOCOL", "http/json")
    assert open_usage_export("", "w", None) is None
    assert "http/json" in said[0]["reason"]
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter.otlp.proto.http.metric_exporter", None)
    assert open_usage_export("http://127.0.0.1:1/v1/metrics", "w", None) is None
    assert "pip install opentelemetry-exporter-otlp-proto-http" in said[1]["reason"]


@pytest.mark.parametrize("by", ["setting", "variable", "setting of HTTP", "variables of HTTP"])
async def test_the_receiver_has_what_the_meter_counted(
    tmp_path: Path,
    http: aiohttp.ClientSession,
    receiver: MetricsServer,
    monkeypatch: pytest.MonkeyPatch,
    by: str,
) -> None:
    prices = tmp_path / "prices.toml"
    prices.write_text(
        "[cost]\ncurrency = 'EUR'\n[[cost.tokens]]\n"
        "input_per_million = 2.0\ncached_per_million = 0.5\noutput_per_million = 8.0\n"
    )
    settings: dict[str, Any] = {"gateway__price_file": prices}
    if by.endswith("HTTP"):
        pytest.importorskip(
            "opentelemetry.exporter.otlp.proto.http", reason="OTLP over HTTP is not installed"
        )
    if by == "setting":
        settings["gateway__usage_otlp_endpoint"] = receiver.endpoint
    elif by == "setting of HTTP":
        settings["gateway__usage_otlp_endpoint"] = f"{receiver.http_address}/v1/metrics"
    elif by == "variables of HTTP":
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", receiver.http_address)
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_PROTOCOL", "http/protobuf")
    else:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_METRICS_ENDPOINT", receiver.endpoint)
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_METRICS_INSECURE", "true")
    tally = Tally()
    engine = FakeEngine("e", behave=tally)
    async with running(tmp_path / "state", [engine], **settings) as bench:
        for number in range(9):
            assert await ask(bench, http, f"t{number % 3}", stream=number % 2 == 0) == 200
        engine.behave = broken
        assert await ask(bench, http, "t0") >= 400
        counted = await used(bench, UsageField.TENANT)
        book = bench.gateway.state.usage.book
        assert book is not None
    # The gateway has ended, so its last sums were sent.
    for (tenant,), counts in counted.items():
        got = {
            key[0].removeprefix(usage_export.PREFIX): value
            for key, value in receiver.values.items()
            if key[1:] == (tenant, MODEL)
        }
        assert got["input_tokens"] == counts.input_tokens
        assert got["cached_tokens"] == counts.cached_tokens
        assert got["output_tokens"] == counts.output_tokens
        assert got["estimated_tokens"] == counts.estimated_tokens
        assert got["cost"] == pytest.approx(money_of(book, MODEL, WorkClass.ONLINE, counts).total)
        requests = {
            key[3]: value
            for key, value in receiver.values.items()
            if key[1:3] == (tenant, MODEL) and len(key) == 4
        }
        assert requests["failed"] == counts.failed
        assert sum(requests.values()) == counts.requests
    assert set(counted) == {("t0",), ("t1",), ("t2",)}
    assert sum(counts.output_tokens for counts in counted.values()) >= tally.counts.output_tokens
    assert receiver.units[usage_export.PREFIX + "cost"] == "{EUR}"
    assert receiver.resource["service.name"] == "mooncache-gateway"
    assert receiver.resource["service.instance.id"]
    assert receiver.monotonic
