"""Control calls carry the trace: a client span there, a server span here, nothing for background calls."""

from __future__ import annotations

from mooncache.config import Config
from mooncache.proto.v1 import master_pb2 as pb
from mooncache.runtime import tracing
from tests.runtime.service.support import TestService, channel
from tests.runtime.tracing.collector import Collector

CALL = "mooncache.v1.MasterService/GetStatus"


async def test_a_call_within_a_request_is_part_of_its_trace(traced: Config, collector: Collector) -> None:
    service = TestService(traced)
    await service.start()
    tracing.setup("test", traced)
    link = channel(service)
    try:
        await link.call(
            "GetStatus", pb.GetStatusRequest(), pb.GetStatusResponse, 5.0
        )  # as a duty does it: no trace
        with tracing.span("gateway.request", {}, kind="server"):
            await link.call("GetStatus", pb.GetStatusRequest(), pb.GetStatusResponse, 5.0)
    finally:
        await link.close()
        await service.stop()
    tracing.flush()
    spans = collector.wait_for(lambda spans: len(spans) >= 3)
    assert len(spans) == 3
    root = next(span for span in spans if span.name == "gateway.request")
    client = next(span for span in spans if span.name == CALL and span.kind == "client")
    server = next(span for span in spans if span.name == CALL and span.kind == "server")
    assert {span.trace_id for span in spans} == {root.trace_id}
    assert (client.parent_id, server.parent_id) == (root.span_id, client.span_id)


async def test_the_context_travels_when_nothing_is_recorded(config: Config) -> None:
    seen = []
    service = TestService(config)
    await service.start()
    handle = service.runner.table.ops["GetStatus"].handle  # type: ignore[union-attr]

    async def look(state: object, request: pb.GetStatusRequest, context: object) -> pb.GetStatusResponse:
        seen.append(tracing.trace_id())
        return await handle(state, request, context)  # type: ignore[arg-type,return-value]

    ops = service.runner.table.ops  # type: ignore[union-attr]
    ops["GetStatus"] = type(ops["GetStatus"])(ops["GetStatus"].method, look, admin_only=False)  # type: ignore[arg-type]
    link = channel(service)
    try:
        with tracing.span("gateway.request", {}) as span:
            await link.call("GetStatus", pb.GetStatusRequest(), pb.GetStatusResponse, 5.0)
        await link.call("GetStatus", pb.GetStatusRequest(), pb.GetStatusResponse, 5.0)
    finally:
        await link.close()
        await service.stop()
    assert seen == [span.context.trace_id, ""]
