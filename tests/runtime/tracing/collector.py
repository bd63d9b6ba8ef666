"""An OTLP collector inside of the test, by gRPC and HTTP: takes spans and lets a test wait for those it wants."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import grpc

from tests.otlp_http import OtlpHttpReceiver

KINDS = {1: "internal", 2: "server", 3: "client"}
_METHOD = "/opentelemetry.proto.collector.trace.v1.TraceService/Export"


@dataclass(frozen=True)
class Seen:
    """One span as it came in; ids in hex, `failed` when its status is an error."""

    service: str
    name: str
    kind: str
    trace_id: str
    span_id: str
    parent_id: str
    failed: bool
    attributes: dict[str, Any] = field(hash=False)


class Collector:
    """Listens on loopback from `start` to `stop`; `endpoint` or `http_endpoint` is what goes into tracing.endpoint."""

    def __init__(self) -> None:
        from opentelemetry.proto.collector.trace.v1 import trace_service_pb2 as pb

        self._pb = pb
        self._spans: list[Seen] = []
        self._changed = threading.Condition()
        self._server = grpc.server(ThreadPoolExecutor(max_workers=2))
        handler = grpc.unary_unary_rpc_method_handler(
            self._export,
            request_deserializer=pb.ExportTraceServiceRequest.FromString,
            response_serializer=lambda message: message.SerializeToString(),
        )
        service, method = _METHOD[1:].split("/")
        self._server.add_generic_rpc_handlers(
            (grpc.method_handlers_generic_handler(service, {method: handler}),)
        )
        self.endpoint = f"http://127.0.0.1:{self._server.add_insecure_port('127.0.0.1:0')}"
        self.http = OtlpHttpReceiver(
            "/v1/traces", pb.ExportTraceServiceRequest, lambda request: self._export(request, None)
        )
        self.http_endpoint = f"{self.http.address}/v1/traces"

    def start(self) -> None:
        self._server.start()

    def stop(self) -> None:
        self.http.stop()
        self._server.stop(1.0).wait(5.0)

    @property
    def spans(self) -> list[Seen]:
        with self._changed:
            return list(self._spans)

    def wait_for(self, enough: Callable[[list[Seen]], bool], timeout_s: float = 90.0) -> list[Seen]:
        """All spans, once `enough` says so; fails with what is there otherwise."""
        with self._changed:
            came = self._changed.wait_for(lambda: enough(self._spans), timeout_s)
            listed = "\n".join(f"{s.service} {s.name} {s.attributes}" for s in self._spans[-60:])
            assert came, f"these spans only came:\n{listed}"
            return list(self._spans)

    def _export(self, request: Any, _context: Any) -> Any:
        found = []
        for resource in request.resource_spans:
            service = next(
                (a.value.string_value for a in resource.resource.attributes if a.key == "service.name"), ""
            )
            for scope in resource.scope_spans:
                found += [_seen(service, span) for span in scope.spans]
        with self._changed:
            self._spans += found
            self._changed.notify_all()
        return self._pb.ExportTraceServiceResponse()


def _seen(service: str, span: Any) -> Seen:
    attributes = {}
    for item in span.attributes:
        kind = item.value.WhichOneof("value")
        attributes[item.key] = getattr(item.value, kind) if kind else None
    return Seen(
        service,
        span.name,
        KINDS.get(span.kind, ""),
        span.trace_id.hex(),
        span.span_id.hex(),
        span.parent_span_id.hex(),
        span.status.code == 2,
        attributes,
    )
