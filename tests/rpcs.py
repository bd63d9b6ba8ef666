"""Control calls of which a test has the name only, and the question for a port's health."""

from __future__ import annotations

import grpc
from google.protobuf.descriptor import ServiceDescriptor
from google.protobuf.message import Message
from grpc_health.v1 import health_pb2

from mooncache.runtime.rpc import methods_of


def answer_of(service: ServiceDescriptor, method: str) -> type[Message]:
    """The message that a call answers with."""
    return methods_of(service)[method].response_class


async def health_of(target: str, name: str = "") -> str:
    """What a control port says of one of its services to a caller without a token: the status's name."""
    async with grpc.aio.insecure_channel(target) as channel:
        check = channel.unary_unary(
            "/grpc.health.v1.Health/Check",
            request_serializer=health_pb2.HealthCheckRequest.SerializeToString,
            response_deserializer=health_pb2.HealthCheckResponse.FromString,
        )
        answer = await check(health_pb2.HealthCheckRequest(service=name), timeout=30)
    return str(health_pb2.HealthCheckResponse.ServingStatus.Name(answer.status))
