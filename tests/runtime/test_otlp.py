"""Which protocol an address means, and what is said where it cannot be spoken."""

from __future__ import annotations

import sys

import pytest

from mooncache.runtime import otlp

VARIABLE = "OTEL_EXPORTER_OTLP_PROTOCOL"


@pytest.mark.parametrize(
    ("address", "protocol", "url"),
    [
        ("http://collector:4317", otlp.GRPC, "http://collector:4317"),
        ("http://collector:4317/", otlp.GRPC, "http://collector:4317/"),
        ("collector:4317", otlp.GRPC, "collector:4317"),
        ("http://collector", otlp.GRPC, "http://collector"),
        ("http://[::1]:4317", otlp.GRPC, "http://[::1]:4317"),
        ("http://collector:99999", otlp.GRPC, "http://collector:99999"),
        ("http://collector:4318", otlp.HTTP, "http://collector:4318/v1/traces"),
        ("http://[::1]:4318/", otlp.HTTP, "http://[::1]:4318/v1/traces"),
        ("https://otlp.example.com/v1/traces", otlp.HTTP, "https://otlp.example.com/v1/traces"),
        ("http://collector:4317/otlp/v1/traces", otlp.HTTP, "http://collector:4317/otlp/v1/traces"),
    ],
)
def test_an_address_says_what_is_spoken_there(address: str, protocol: str, url: str) -> None:
    assert otlp.protocol_of(address) == protocol
    assert otlp.url_of(address, "traces") == url


def test_variables_are_asked_before_the_address() -> None:
    asked = otlp.variables_protocol
    assert asked("metrics", "http://collector:4317", {}) == otlp.GRPC
    assert asked("metrics", "http://collector:4318", {}) == otlp.HTTP
    assert asked("metrics", "http://collector:4318", {VARIABLE: "grpc"}) == otlp.GRPC
    both = {VARIABLE: "http/protobuf", "OTEL_EXPORTER_OTLP_METRICS_PROTOCOL": "grpc"}
    assert asked("metrics", "http://collector", both) == otlp.GRPC
    assert asked("traces", "http://collector", both) == otlp.HTTP
    with pytest.raises(otlp.UnspokenProtocolError, match="http/json is not spoken"):
        asked("traces", "http://collector", {VARIABLE: "http/json"})


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter.otlp.proto.http.trace_exporter", None)
    with pytest.raises(ImportError, match="pip install opentelemetry-exporter-otlp-proto-http"):
        otlp.exporter("traces", otlp.HTTP, "http://127.0.0.1:1/v1/traces", 1.0)
