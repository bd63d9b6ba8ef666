"""How a process sends to an OpenTelemetry collector: OTLP over gRPC, or over HTTP with protobuf.

An address says itself which of both it is. gRPC has no paths, and 4318 is the port registered for HTTP. So
`http://collector:4317` is gRPC; `http://collector:4318` and `https://collector/otlp/v1/traces` are HTTP.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any, Final, Literal
from urllib.parse import urlsplit

Signal = Literal["traces", "metrics"]

GRPC: Final = "grpc"
HTTP: Final = "http/protobuf"
HTTP_PORT: Final = 4318
HTTP_PACKAGE: Final = "opentelemetry-exporter-otlp-proto-http"
_EXPORTERS: Final = {
    "traces": ("trace_exporter", "OTLPSpanExporter"),
    "metrics": ("metric_exporter", "OTLPMetricExporter"),
}


class UnspokenProtocolError(ValueError):
    """A variable of the environment asks for a protocol that is not spoken here."""


def protocol_of(address: str) -> str:
    """The protocol of an address, by OpenTelemetry's names. An address that is no URL counts as gRPC's."""
    try:
        parts = urlsplit(address if "://" in address else f"//{address}")
        port = parts.port
    except ValueError:
        return GRPC
    return HTTP if parts.path.strip("/") or port == HTTP_PORT else GRPC


def url_of(address: str, signal: Signal) -> str:
    """Where a signal goes: over HTTP to the standard path where the address has none."""
    if protocol_of(address) == GRPC or urlsplit(address).path.strip("/"):
        return address
    return f"{address.rstrip('/')}/v1/{signal}"


def variables_protocol(signal: Signal, address: str, env: Mapping[str, str]) -> str:
    """The protocol for an address that came from OpenTelemetry's variables. Raises UnspokenProtocolError."""
    names = (f"OTEL_EXPORTER_OTLP_{signal.upper()}_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")
    protocol = next((env[name] for name in names if env.get(name)), "") or protocol_of(address)
    if protocol not in {GRPC, HTTP}:
        raise UnspokenProtocolError(f"{protocol} is not spoken, {GRPC} and {HTTP} are")
    return protocol


def exporter(signal: Signal, protocol: str, address: str, timeout_s: float) -> Any:
    """OpenTelemetry's exporter of a signal. Headers, certificates and compression are those of its variables.

    address: "" leaves it to the variables, too. Raises ImportError where the package is missing.
    """
    module, name = _EXPORTERS[signal]
    given: dict[str, Any] = {}
    if protocol == HTTP:
        if address:
            given["endpoint"] = url_of(address, signal)
        package = "http"
    else:
        if address:
            given |= {"endpoint": address, "insecure": not address.startswith("https://")}
        package = "grpc"
    try:
        found = importlib.import_module(f"opentelemetry.exporter.otlp.proto.{package}.{module}")
    except ImportError as error:
        if protocol == HTTP:
            raise ImportError(f"{error}: pip install {HTTP_PACKAGE}") from None
        raise
    return getattr(found, name)(timeout=timeout_s, **given)
