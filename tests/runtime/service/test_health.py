"""grpc.health.v1 on a control port: what it says follows the service, needs no token, and takes no place of calls."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2

from mooncache.config import Config
from mooncache.proto.v1 import master_pb2 as pb
from mooncache.runtime.health import LIVENESS, READINESS, WATCH_COUNT_MAX
from tests.conditions import until
from tests.rpcs import health_of
from tests.runtime.service.support import TestService, channel, http

NAME = "mooncache.v1.MasterService"
SERVING, NOT_SERVING = "SERVING", "NOT_SERVING"
Status = health_pb2.HealthCheckResponse


def method(of: grpc.aio.Channel, name: str) -> Any:
    path = f"/grpc.health.v1.Health/{name}"
    if name == "List":
        return of.unary_unary(
            path,
            health_pb2.HealthListRequest.SerializeToString,
            health_pb2.HealthListResponse.FromString,
        )
    return of.unary_stream(path, health_pb2.HealthCheckRequest.SerializeToString, Status.FromString)


async def test_it_says_what_the_service_knows_of_itself(config: Config) -> None:
    class Standby(TestService):
        not_serving = ""

        def serving(self) -> str:
            return self.not_serving

    service = Standby(config)
    await service.start()
    target = service.grpc_target

    async def all_of() -> list[str]:
        return [await health_of(target, name) for name in ("", READINESS, LIVENESS, NAME)]

    try:
        assert await all_of() == [SERVING, SERVING, SERVING, SERVING]
        assert (await http(service, "/serving"))[0] == 200
        service.not_serving = "another one leads"
        assert await all_of() == [SERVING, SERVING, SERVING, NOT_SERVING]
        status, body = await http(service, "/serving")
        assert (status, json.loads(body)["reason"]) == (503, "another one leads")
        assert (await http(service, "/ready"))[0] == 200
        service.not_ready = "loading"
        assert await all_of() == [NOT_SERVING, NOT_SERVING, SERVING, NOT_SERVING]
        service.not_ready = service.not_serving = ""
        assert await all_of() == [SERVING, SERVING, SERVING, SERVING]
        with pytest.raises(grpc.aio.AioRpcError) as unknown:
            await health_of(target, "mooncache.v1.WorkerService")
        assert unknown.value.code() is grpc.StatusCode.NOT_FOUND
        async with grpc.aio.insecure_channel(target) as plain:
            listed = await method(plain, "List")(health_pb2.HealthListRequest(), timeout=30)
        assert {name: one.status for name, one in listed.statuses.items()} == dict.fromkeys(
            ("", READINESS, LIVENESS, NAME), Status.SERVING
        )
    finally:
        await service.stop()


async def test_a_watch_hears_of_changes_and_of_the_end(config: Config) -> None:
    service = TestService(config)
    draining = asyncio.Event()
    service.drain = draining.wait  # type: ignore[method-assign,assignment]
    await service.start()
    async with grpc.aio.insecure_channel(service.grpc_target) as plain:
        watch = method(plain, "Watch")(health_pb2.HealthCheckRequest(service=READINESS), timeout=90)
        stranger = method(plain, "Watch")(health_pb2.HealthCheckRequest(service="x"), timeout=90)
        assert (await watch.read()).status == Status.SERVING
        assert (await stranger.read()).status == Status.SERVICE_UNKNOWN
        service.not_ready = "loading"
        assert (await watch.read()).status == Status.NOT_SERVING
        service.not_ready = ""
        assert (await watch.read()).status == Status.SERVING
        stopping = asyncio.create_task(service.stop())
        assert (await watch.read()).status == Status.NOT_SERVING, "while it drains, calls are still answered"
        assert await health_of(service.grpc_target, LIVENESS) == SERVING
        draining.set()
        for stream in (watch, stranger):
            assert await stream.read() is grpc.aio.EOF
            assert await stream.code() is grpc.StatusCode.OK
        await stopping


async def test_watches_leave_places_for_calls(config: Config) -> None:
    service = TestService(config)  # takes 64 calls at once
    most = min(WATCH_COUNT_MAX, 64 // 4)
    await service.start()
    try:
        async with grpc.aio.insecure_channel(service.grpc_target) as plain:
            watch = method(plain, "Watch")
            opened = [watch(health_pb2.HealthCheckRequest(), timeout=90) for _ in range(most)]
            for stream in opened:
                assert (await stream.read()).status == Status.SERVING
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await watch(health_pb2.HealthCheckRequest(), timeout=90).read()
            assert refused.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
            assert await health_of(service.grpc_target) == SERVING
            ours = channel(service)
            assert (await ours.call("GetStatus", pb.GetStatusRequest(), pb.GetStatusResponse, 30)).leading
            await ours.close()
            opened[0].cancel()

            async def has_room() -> bool:
                try:
                    return (
                        await watch(health_pb2.HealthCheckRequest(), timeout=90).read()
                    ) is not grpc.aio.EOF
                except grpc.aio.AioRpcError:
                    return False

            await until(has_room, "the place of the one that left")
    finally:
        await service.stop()
