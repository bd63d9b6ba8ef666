"""Control calls over a path that somebody listens on, holds back, changes and answers himself."""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections.abc import AsyncIterator

import grpc
import pytest

from mooncache import auth, errors
from mooncache.config import Config
from mooncache.errors import to_metadata
from mooncache.proto.v1 import master_pb2 as pb
from mooncache.runtime import grpc_channel, rpc
from mooncache.runtime.grpc_channel import GrpcChannel
from mooncache.runtime.grpc_status import to_library
from tests.conditions import until
from tests.relay import relay_to
from tests.runtime.service.support import TestService

PATH = "/mooncache.v1.MasterService/"


@pytest.fixture
async def service(config: Config) -> AsyncIterator[TestService]:
    made = TestService(config)
    await made.start()
    yield made
    await made.stop()


@contextlib.asynccontextmanager
async def channel(target: str, token: auth.Token) -> AsyncIterator[GrpcChannel]:
    made = GrpcChannel(target, rpc.MASTER_SERVICE, token=token.text)
    try:
        yield made
    finally:
        await made.close()


async def test_a_relay_sees_no_token_and_nothing_that_works_again(service: TestService) -> None:
    tenant = auth.tenant_token(service.token, "team-a")
    async with relay_to(service.grpc_target) as relay:
        for token in (service.token, tenant):
            async with channel(relay.target, token) as link:
                for _ in range(3):
                    await link.call("GetStatus", pb.GetStatusRequest(), pb.GetStatusResponse, 10.0)
                await link.call("GetTask", pb.GetTaskRequest(task_id="once"), pb.GetTaskResponse, 10.0)
    seen = bytes(relay.seen)
    for token in (service.token, tenant):
        for secret in (token.text.encode(), token.key.hex().encode(), token.key):
            assert secret not in seen
    proofs = {
        match.decode() for match in re.findall(rb"mcp1 [*a-z0-9_.-]+ \S+ [0-9a-f]{32} \d+ [0-9a-f]{64}", seen)
    }
    assert len(proofs) == 2 * 5  # each of the two asked for the nonce first
    carried_out = len(service.state["contexts"])
    bodies = (pb.GetStatusRequest(), pb.GetTaskRequest(task_id="once"), pb.HeartbeatRequest(last_seq=7))
    async with grpc.aio.insecure_channel(service.grpc_target) as raw:
        for proof in sorted(proofs):
            for method, body in zip(("GetStatus", "GetTask", "Heartbeat"), bodies, strict=True):
                with pytest.raises(grpc.aio.AioRpcError) as caught:
                    await raw.unary_unary(PATH + method)(
                        body.SerializeToString(), timeout=10, metadata=(("authorization", proof),)
                    )
                assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED
    assert len(service.state["contexts"]) == carried_out
    assert "heartbeats" not in service.state


async def test_a_token_that_is_sent_is_refused(service: TestService) -> None:
    async with grpc.aio.insecure_channel(service.grpc_target) as raw:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await raw.unary_unary(PATH + "GetStatus")(
                b"", timeout=10, metadata=(("authorization", f"Bearer {service.token.text}"),)
            )
    assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED
    assert "instead of a proof" in (caught.value.details() or "")
    assert "contexts" not in service.state


async def test_a_changed_request_is_not_carried_out(service: TestService) -> None:
    async with relay_to(service.grpc_target) as relay, channel(relay.target, service.token) as link:
        await link.call("GetTask", pb.GetTaskRequest(task_id="a name of it"), pb.GetTaskResponse, 10.0)
        relay.up = lambda data: data.replace(b"a name of it", b"another name")
        with pytest.raises(errors.Unauthenticated):
            await link.call("GetTask", pb.GetTaskRequest(task_id="a name of it"), pb.GetTaskResponse, 10.0)


async def test_a_changed_answer_is_not_believed(service: TestService) -> None:
    async with relay_to(service.grpc_target) as relay, channel(relay.target, service.token) as link:
        relay.down = lambda data: data.replace(b"a name of it", b"another name")
        with pytest.raises(errors.Unauthenticated, match="without proving"):
            await link.call("GetTask", pb.GetTaskRequest(task_id="a name of it"), pb.GetTaskResponse, 10.0)
        relay.down = lambda data: data.replace(b"a newer one is there", b"an older one is here")
        with pytest.raises(errors.Unauthenticated, match="without proving"):
            await link.call("GetTask", pb.GetTaskRequest(task_id="stale"), pb.GetTaskResponse, 10.0)


@pytest.mark.parametrize("refusal", [None, errors.StaleIncarnation("so says a stranger")])
async def test_who_answers_without_the_secret_is_not_believed(
    service: TestService, refusal: errors.MooncacheError | None
) -> None:
    async def behave(_request: bytes, context: grpc.aio.ServicerContext) -> bytes:
        if refusal is not None:
            await context.abort(to_library(refusal.grpc_status), refusal.message, to_metadata(refusal))
        return pb.GetStatusResponse(master_id="impostor", leading=True).SerializeToString()

    stranger = grpc.aio.server()
    handler = {"GetStatus": grpc.unary_unary_rpc_method_handler(behave)}
    stranger.add_generic_rpc_handlers(
        (grpc.method_handlers_generic_handler(rpc.MASTER_SERVICE.full_name, handler),)
    )
    port = stranger.add_insecure_port("127.0.0.1:0")
    await stranger.start()
    try:
        async with channel(f"127.0.0.1:{port}", service.token) as link:
            with pytest.raises(errors.Unauthenticated, match="without proving"):
                await link.call("GetStatus", pb.GetStatusRequest(), pb.GetStatusResponse, 10.0)
    finally:
        await stranger.stop(0)


async def test_callers_go_on_with_the_next_life_of_a_service(service: TestService, config: Config) -> None:
    port = int(service.grpc_target.rpartition(":")[2])
    async with channel(service.grpc_target, service.token) as link:
        await link.call("GetStatus", pb.GetStatusRequest(), pb.GetStatusResponse, 10.0)
        await service.stop()
        again = TestService(config, port=port)
        await again.start()
        try:
            while True:
                with contextlib.suppress(errors.MasterUnavailable):  # gRPC waits before it connects again
                    await link.call("GetStatus", pb.GetStatusRequest(), pb.GetStatusResponse, 10.0)
                    break
            assert len(again.state["contexts"]) == 1
        finally:
            await again.stop()


async def test_a_connection_that_passes_nothing_any_more_is_replaced(
    service: TestService, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither end learns of it. Calls end at their deadlines, and go on by a new connection after a while."""
    options = [
        (name, 1000 if value == grpc_channel.KEEPALIVE_MS else value)
        for name, value in grpc_channel._CHANNEL_OPTIONS
    ]
    monkeypatch.setattr(grpc_channel, "_CHANNEL_OPTIONS", options)
    async with relay_to(service.grpc_target) as relay, channel(relay.target, service.token) as link:
        await link.call("GetStatus", pb.GetStatusRequest(), pb.GetStatusResponse, 10.0)
        assert relay.opened == 1
        relay.lose()
        with pytest.raises((errors.DeadlineExceeded, errors.MasterUnavailable)):
            await link.call("GetStatus", pb.GetStatusRequest(), pb.GetStatusResponse, 1.0)

        async def answers() -> bool:
            with contextlib.suppress(errors.MasterUnavailable, errors.DeadlineExceeded):
                await link.call("GetStatus", pb.GetStatusRequest(), pb.GetStatusResponse, 1.0)
                return True
            return False

        await until(answers, "an answer by another connection")
        assert relay.opened > 1


async def test_many_calls_at_once_are_each_carried_out_once(service: TestService) -> None:
    async with channel(service.grpc_target, service.token) as link:
        calls = (
            link.call("Heartbeat", pb.HeartbeatRequest(last_seq=number), pb.HeartbeatResponse, 30.0)
            for number in range(50)
        )
        answers = await asyncio.gather(*calls)
    assert [answer.epoch for answer in answers] == list(range(50))
    assert sorted(service.state["heartbeats"]) == list(range(50))
