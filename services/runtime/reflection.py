"""gRPC's reflection on a control port: which services there are, and their messages, for tools such as grpcurl.

It is answered from descriptors that are public anyway, by the library's servicer. What is ours: who may ask (`admit`),
how many at once, for how long. The two versions of the protocol have the same messages; the library has the older name.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from typing import Any, Final

import grpc
from grpc_reflection.v1alpha import reflection as library
from grpc_reflection.v1alpha import reflection_pb2
from grpc_reflection.v1alpha.reflection import SERVICE_NAME

STREAM_COUNT_MAX: Final = 16
STREAM_S: Final = 60.0
SERVICE_NAME_V1: Final = "grpc.reflection.v1.ServerReflection"
METHOD: Final = "ServerReflectionInfo"

Admit = Callable[[Any, str], Awaitable[None]]
"""Given gRPC's context and the method's path: ends the call of a caller that may not ask."""


class ReflectionPort:
    """Reflection of one port: the services in `names`, and itself."""

    def __init__(self, names: Iterable[str], admit: Admit, stream_count_max: int = STREAM_COUNT_MAX) -> None:
        self._stream_count_max = stream_count_max
        servicer = library.aio.ReflectionServicer  # type: ignore[attr-defined]
        self._library: Any = servicer([*names, SERVICE_NAME])
        self._admit = admit
        self._open: set[asyncio.Timeout] = set()
        self._closed = False

    def handlers(self) -> list[grpc.GenericRpcHandler[Any, Any]]:
        """What the server dispatches to: the protocol under both of its names."""
        return [
            grpc.method_handlers_generic_handler(
                name,
                {
                    METHOD: grpc.stream_stream_rpc_method_handler(
                        self._behaviour(f"/{name}/{METHOD}"),
                        reflection_pb2.ServerReflectionRequest.FromString,
                        reflection_pb2.ServerReflectionResponse.SerializeToString,
                    )
                },
            )
            for name in (SERVICE_NAME, SERVICE_NAME_V1)
        ]

    def close(self) -> None:
        """End the streams; the port is about to close."""
        self._closed = True
        for limit in self._open:
            if not limit.expired():
                limit.reschedule(asyncio.get_running_loop().time())

    def _behaviour(self, path: str) -> Callable[[Any, Any], AsyncIterator[Any]]:
        async def behave(requests: AsyncIterator[Any], context: Any) -> AsyncIterator[Any]:
            await self._admit(context, path)
            if self._closed or len(self._open) >= self._stream_count_max:
                await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "Too many streams ask; try again.")
            limit = asyncio.timeout(STREAM_S)
            try:
                async with limit:
                    self._open.add(limit)
                    async for answer in self._library.ServerReflectionInfo(requests, context):
                        yield answer
            except TimeoutError:
                await context.abort(
                    grpc.StatusCode.DEADLINE_EXCEEDED, f"The stream ended after {STREAM_S:g} s."
                )
            finally:
                self._open.discard(limit)

        return behave
