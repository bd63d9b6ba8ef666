"""The endpoint picker's port, asked by a test in Envoy's place: messages that a real Envoy seldom sends, or never."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2

from mooncache.auth import picker_key
from mooncache.gateway.core.fleet import EngineInstance
from mooncache.gateway.picker.endpoints import fallbacks, host_and_port, outside, subset_of
from mooncache.gateway.picker.messages import PIECE_BYTES, answer_pieces
from mooncache.gateway.picker.pick import resolved, with_model
from mooncache.gateway.picker.service import PickerService
from mooncache.proto.envoy import ext_proc_pb2 as ext
from tests.conditions import until
from tests.gateway.stand_in import MODEL, Bench, FakeEngine, running

PATH = "/envoy.service.ext_proc.v3.ExternalProcessor/Process"
BODY = b'{"model": "test-model", "messages": [{"role": "user", "content": "hi"}]}'


@asynccontextmanager
async def picker(tmp_path: Path, **settings: Any) -> AsyncIterator[tuple[Bench, grpc.aio.Channel]]:
    engines = [FakeEngine("d1"), FakeEngine("d2")]
    async with (
        running(tmp_path, engines, serves=PickerService, **settings) as bench,
        grpc.aio.insecure_channel(f"127.0.0.1:{bench.gateway.http_port}") as channel,
    ):
        yield bench, channel


def process(bench: Bench, channel: grpc.aio.Channel, key: str | None = None) -> Any:
    call = channel.stream_stream(
        PATH, ext.ProcessingRequest.SerializeToString, ext.ProcessingResponse.FromString
    )
    shown = picker_key(bench.gateway.token) if key is None else key
    return call(metadata=(("authorization", f"Bearer {shown}"),), timeout=60)


def head(bench: Bench, *, end: bool = False, **more: str) -> ext.ProcessingRequest:
    headers = {":method": "POST", ":path": "/v1/chat/completions?x=1", **bench.auth(), **more}
    message = ext.ProcessingRequest()
    message.request_headers.end_of_stream = end
    for name, value in headers.items():
        message.request_headers.headers.headers.add(key=name, raw_value=value.encode())
    return message


def piece(data: bytes, *, end: bool) -> ext.ProcessingRequest:
    return ext.ProcessingRequest(request_body=ext.HttpBody(body=data, end_of_stream=end))


def answer_head(served: str = "") -> ext.ProcessingRequest:
    message = ext.ProcessingRequest()
    message.response_headers.headers.headers.add(key=":status", raw_value=b"200")
    if served:
        lb = message.metadata_context.filter_metadata["envoy.lb"]
        lb.update({"x-gateway-destination-endpoint-served": served})
    return message


def set_headers(mutation: ext.HeaderMutation) -> dict[str, str]:
    return {option.header.key: option.header.raw_value.decode() for option in mutation.set_headers}


async def test_header_and_metadata_name_the_same_endpoint(tmp_path: Path) -> None:
    async with picker(tmp_path) as (bench, channel):
        call = process(bench, channel)
        await call.write(head(bench))
        await call.write(piece(BODY[:10], end=False))
        await call.write(piece(BODY[10:], end=True))
        first = await call.read()
        endpoint = bench.engines["d1"].url.removeprefix("http://")
        common = first.request_headers.response
        assert set_headers(common.header_mutation)["x-gateway-destination-endpoint"] == endpoint
        assert set_headers(common.header_mutation)[":path"] == "/v1/chat/completions"
        assert first.dynamic_metadata["envoy.lb"]["x-gateway-destination-endpoint"] == endpoint
        body = (await call.read()).request_body.response.body_mutation.streamed_response
        assert body.end_of_stream
        assert b'"messages"' in body.body and b'"mooncache"' in body.body


async def test_trailers_end_both_directions(tmp_path: Path) -> None:
    async with picker(tmp_path) as (bench, channel):
        call = process(bench, channel)
        await call.write(head(bench))
        await call.write(piece(BODY, end=False))
        await call.write(ext.ProcessingRequest(request_trailers=ext.HttpTrailers()))
        assert (await call.read()).HasField("request_headers")
        assert not (await call.read()).request_body.response.body_mutation.streamed_response.end_of_stream
        assert (await call.read()).HasField("request_trailers")
        await call.write(answer_head(served=bench.engines["d2"].url.removeprefix("http://")))
        answer = ext.HttpBody(body=b'{"choices": [], "usage": {"completion_tokens": 7}}')
        await call.write(ext.ProcessingRequest(response_body=answer))
        await call.write(ext.ProcessingRequest(response_trailers=ext.HttpTrailers()))
        assert (await call.read()).HasField("response_headers")
        assert not (await call.read()).response_body.response.body_mutation.streamed_response.end_of_stream
        assert (await call.read()).HasField("response_trailers")
        assert await call.read() is grpc.aio.EOF  # type: ignore[attr-defined]
        await bench.conductor.wait_for_phase("FINISHED")
        # the fallback that answered, by its name
        assert bench.conductor.last_legs() == [("decode", "d2", "OK")]
        assert bench.conductor.updates[-1].output_tokens == 7


@pytest.mark.parametrize("when", ["head", "body", "routed", "answered"])
async def test_envoy_cuts_the_stream(tmp_path: Path, when: str) -> None:
    async with picker(tmp_path) as (bench, channel):
        call = process(bench, channel)
        await call.write(head(bench))
        if when != "head":
            await call.write(piece(BODY, end=when != "body"))
        if when in ("routed", "answered"):
            await call.read()
        if when == "answered":
            await call.write(answer_head())
            await until(lambda: bench.gateway.state.active_count == 1)
        await until(lambda: bench.gateway.state.active_count == 1)
        call.cancel()
        await until(lambda: bench.gateway.state.active_count == 0)
        assert bench.gateway.state.bodies.bytes == 0
        if when in ("routed", "answered"):
            await bench.conductor.wait_for_phase("ABORTED")


async def test_an_end_of_the_stream_without_a_cut(tmp_path: Path) -> None:
    async with picker(tmp_path) as (bench, channel):
        call = process(bench, channel)
        await call.write(head(bench))
        await call.write(piece(BODY, end=True))
        await call.read()
        await call.done_writing()
        await bench.conductor.wait_for_phase("ABORTED", "FAILED")
        await until(lambda: bench.gateway.state.active_count == 0)


async def test_messages_that_make_no_sense(tmp_path: Path) -> None:
    async with picker(tmp_path) as (bench, channel):
        for first in (piece(BODY, end=True), ext.ProcessingRequest(), answer_head()):
            call = process(bench, channel)
            await call.write(first)
            assert await call.read() is grpc.aio.EOF  # type: ignore[attr-defined]
        call = process(bench, channel)
        await call.write(head(bench))
        await call.write(answer_head())  # in the middle of the request: an empty piece of it
        await call.write(piece(b"", end=True))
        assert (await call.read()).immediate_response.status.code == 400
        call = process(bench, channel)
        await call.write(head(bench, end=True))
        refused = (await call.read()).immediate_response
        assert (refused.status.code, b"empty" in refused.body) == (400, True)
        watching = head(bench)
        watching.observability_mode = True
        call = process(bench, channel)
        await call.write(watching)
        assert (await call.read()).immediate_response.status.code == 500
        assert not bench.conductor.scheduled


async def test_who_does_not_know_the_key_learns_nothing(tmp_path: Path) -> None:
    async with picker(tmp_path) as (bench, channel):
        for key in ("", "mcx1.00", bench.key()):
            call = process(bench, channel, key)
            assert await call.code() is grpc.StatusCode.UNAUTHENTICATED
            assert "mooncache token --picker" in await call.details()


async def test_health_names_envoys_service(tmp_path: Path) -> None:
    async with picker(tmp_path) as (bench, channel):
        check = channel.unary_unary(
            "/grpc.health.v1.Health/Check",
            health_pb2.HealthCheckRequest.SerializeToString,
            health_pb2.HealthCheckResponse.FromString,
        )

        async def status(service: str) -> int:
            return int((await check(health_pb2.HealthCheckRequest(service=service), timeout=20)).status)

        names = ("liveness", "readiness", "envoy.service.ext_proc.v3.ExternalProcessor")
        assert [await status(name) for name in names] == [health_pb2.HealthCheckResponse.SERVING] * 3
        bench.gateway.state.fleet.known = False
        ready = [await status(name) for name in names]
        assert (
            ready
            == [health_pb2.HealthCheckResponse.SERVING] + [health_pb2.HealthCheckResponse.NOT_SERVING] * 2
        )


def instance(name: str, **more: Any) -> EngineInstance:
    return EngineInstance(name, url=f"http://10.0.0.{name[1:]}:8000", model=MODEL, **more)


def test_endpoints_of_urls() -> None:
    assert host_and_port("http://10.0.0.1:8000") == ("10.0.0.1", 8000)
    assert host_and_port("https://host/") == ("host", 443)
    assert host_and_port("http://[fe80::1]:81") == ("fe80::1", 81)
    assert host_and_port("http://h:99999") == host_and_port("nonsense") == ("", 0)


async def test_names_become_addresses() -> None:
    assert await resolved("http://localhost:81") in ("127.0.0.1:81", "[::1]:81")
    assert await resolved("http://[fe80::1]:81") == "[fe80::1]:81"
    assert await resolved("http://no.such.host.invalid:81") == "no.such.host.invalid:81"


def test_subsets() -> None:
    assert subset_of(None) is None
    assert subset_of("a:1, b:2,") == subset_of(["a:1", "b:2", 7, "x" * 999]) == {"a:1", "b:2"}
    assert subset_of(7) == subset_of("") == frozenset()
    there = [instance("i1"), instance("i2"), instance("i3", can_generate=False)]
    addresses = {one.instance_id: f"10.0.0.{one.instance_id[1:]}:8000" for one in there}
    assert outside(there, addresses, None) == []
    assert outside(there, addresses, frozenset({"10.0.0.1:8000"})) == ["i2"]


def test_fallbacks_follow_the_chosen_one() -> None:
    there = [instance("i1"), instance("i2"), instance("i3"), instance("i4", can_generate=False)]
    assert [one.instance_id for one in fallbacks(there, "i2", (), 5)] == ["i3", "i1"]
    assert [one.instance_id for one in fallbacks(there, "i3", ("i1",), 5)] == ["i2"]
    assert fallbacks(there, "i1", (), 0) == fallbacks([], "i1", (), 3) == []
    there = [instance("i1"), instance("i2", engine_token="new"), instance("i3")]
    assert [one.instance_id for one in fallbacks(there, "i1", (), 5)] == ["i3"], "Envoy has one key for all"
    assert fallbacks(there, "i2", (), 5) == []
    there = [instance("i1", orders_by_priority=True), instance("i2"), instance("i3", orders_by_priority=True)]
    assert [one.instance_id for one in fallbacks(there, "i1", (), 5)] == ["i3"], "vLLM refuses other places"


def test_bodies_are_cut_into_pieces() -> None:
    data = bytes(range(256)) * 3000
    pieces = [
        m.response_body.response.body_mutation.streamed_response for m in answer_pieces(data, is_last=True)
    ]
    assert b"".join(each.body for each in pieces) == data
    assert max(len(each.body) for each in pieces) == PIECE_BYTES
    assert [each.end_of_stream for each in pieces] == [False] * (len(pieces) - 1) + [True]


def test_another_model_leaves_the_other_bytes() -> None:
    assert with_model(b'{"a":1.50,"model":"x","b":"\\u00e9"}', "y") == b'{"a":1.50,"model":"y","b":"\\u00e9"}'
