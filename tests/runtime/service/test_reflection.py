"""Reflection on a control port: the library's client lists services and reads messages; who may is decided by us."""

from __future__ import annotations

import asyncio
import hashlib
from typing import Any

import grpc
import pytest
from google.protobuf.descriptor_pool import DescriptorPool
from grpc_reflection.v1alpha import reflection_pb2
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase

from mooncache.config import Config, load
from mooncache.runtime.proof import METADATA_KEY, STALE, Prover
from mooncache.runtime.reflection import SERVICE_NAME, SERVICE_NAME_V1, STREAM_COUNT_MAX
from mooncache.runtime.service import Service
from tests.runtime.service.support import TestService

LISTED = ["grpc.health.v1.Health", SERVICE_NAME, "mooncache.v1.MasterService"]


def stream(of: grpc.aio.Channel, name: str = SERVICE_NAME, authorization: str = "") -> Any:
    open_stream = of.stream_stream(
        f"/{name}/ServerReflectionInfo",
        reflection_pb2.ServerReflectionRequest.SerializeToString,
        reflection_pb2.ServerReflectionResponse.FromString,
    )
    return open_stream(timeout=90, metadata=(("authorization", authorization),) if authorization else ())


async def names(service: Service, name: str = SERVICE_NAME, authorization: str = "") -> list[str]:
    """The services that the port lists. Raises AioRpcError."""
    async with grpc.aio.insecure_channel(service.grpc_target) as plain:
        asked = stream(plain, name, authorization)
        await asked.write(reflection_pb2.ServerReflectionRequest(list_services=""))
        answer = await asked.read()
        if answer is grpc.aio.EOF:
            raise AssertionError((await asked.code(), await asked.details()))
        await asked.done_writing()
        assert await asked.read() is grpc.aio.EOF
        return [one.name for one in answer.list_services_response.service]


async def test_a_tool_finds_services_and_their_messages(config: Config) -> None:
    service = TestService(config)
    await service.start()

    def look() -> tuple[list[str], list[str], list[str]]:
        with grpc.insecure_channel(service.grpc_target) as plain:
            database = ProtoReflectionDescriptorDatabase(plain)
            pool = DescriptorPool(database)
            found = pool.FindServiceByName("mooncache.v1.MasterService")
            locate = found.methods_by_name["Locate"].input_type
            return (
                sorted(database.get_services()),
                sorted(found.methods_by_name),
                [f.name for f in locate.fields],
            )

    try:
        listed, methods, fields = await asyncio.to_thread(look)
        assert listed == LISTED
        assert {"GetStatus", "Locate", "WatchClusterMap"} <= set(methods)
        assert "keys" in fields
        assert await names(service, SERVICE_NAME_V1) == LISTED
    finally:
        await service.stop()


async def test_guarded_it_asks_for_a_proof_over_an_empty_request(config: Config) -> None:
    service = TestService(
        load(env={}, overrides={"cluster.state_dir": config.cluster.state_dir, "grpc.reflection": "guarded"})
    )
    await service.start()
    prover, path, empty = (
        Prover(service.token.text),
        f"/{SERVICE_NAME}/ServerReflectionInfo",
        hashlib.sha256().digest(),
    )
    try:
        with pytest.raises(grpc.aio.AioRpcError) as stranger:
            await names(service)
        assert stranger.value.code() is grpc.StatusCode.UNAUTHENTICATED
        first = prover.sign(path, empty)
        with pytest.raises(grpc.aio.AioRpcError) as stale:
            await names(service, authorization=first.authorization)
        text, trailing = stale.value.details() or "", dict(stale.value.trailing_metadata())
        assert prover.proves(
            first, STALE, hashlib.sha256(text.encode()).digest(), str(trailing[METADATA_KEY])
        )
        good = prover.sign(path, empty).authorization
        assert await names(service, authorization=good) == LISTED
        with pytest.raises(grpc.aio.AioRpcError):
            await names(service, authorization=good)  # once
    finally:
        await service.stop()


async def test_it_can_be_off(config: Config) -> None:
    service = TestService(
        load(env={}, overrides={"cluster.state_dir": config.cluster.state_dir, "grpc.reflection": "off"})
    )
    await service.start()
    try:
        with pytest.raises(grpc.aio.AioRpcError) as off:
            await names(service)
        assert off.value.code() is grpc.StatusCode.UNIMPLEMENTED
    finally:
        await service.stop()


async def test_streams_are_few_and_end_with_the_port(config: Config) -> None:
    service = TestService(config)  # takes 64 calls at once
    most = min(STREAM_COUNT_MAX, 64 // 8)
    await service.start()
    async with grpc.aio.insecure_channel(service.grpc_target) as plain:
        opened = [stream(plain) for _ in range(most)]
        for one in opened:
            await one.write(reflection_pb2.ServerReflectionRequest(list_services=""))
            assert (await one.read()).HasField("list_services_response")
        one_more = stream(plain)
        await one_more.write(reflection_pb2.ServerReflectionRequest(list_services=""))
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await one_more.read()
        assert refused.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        await service.stop()
        for one in opened:
            with pytest.raises(grpc.aio.AioRpcError) as ended:
                await one.read()
            assert ended.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
