"""gRPC's own health protocol (grpc.health.v1) on a control port, for probes of orchestrators and for load balancers.

A status is worked out when it is asked for, so it cannot be older than what the process knows itself. No caller proves
a token here: an answer tells one word, as /ready of the probe port does, and carries nothing out. Watches are streams
of strangers: their number is capped, so that they cannot take the places of control calls, and they end with the port.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Mapping
from typing import Any, Final

import grpc
from grpc_health.v1 import health_pb2

WATCH_COUNT_MAX: Final = 64
WATCH_INTERVAL_S: Final = 1.0
SERVICE_NAME: Final = "grpc.health.v1.Health"
LIVENESS: Final = "liveness"
READINESS: Final = "readiness"
_Status = health_pb2.HealthCheckResponse

States = Callable[[], Mapping[str, str]]
"""Why each name does not serve now; "" for one that serves. "" as a name is the process as a whole."""


class HealthPort:
    """Check, List and Watch of one port."""

    def __init__(self, states: States, watch_count_max: int = WATCH_COUNT_MAX) -> None:
        self._states = states
        self._watch_count_max = watch_count_max
        self._closing = asyncio.Event()
        self._watch_count = 0

    def handler(self) -> grpc.GenericRpcHandler[Any, Any]:
        """What the server dispatches to."""
        request, response = health_pb2.HealthCheckRequest.FromString, _Status.SerializeToString
        return grpc.method_handlers_generic_handler(
            SERVICE_NAME,
            {
                "Check": grpc.unary_unary_rpc_method_handler(self._check, request, response),
                "Watch": grpc.unary_stream_rpc_method_handler(self._watch, request, response),
                "List": grpc.unary_unary_rpc_method_handler(
                    self._list,
                    health_pb2.HealthListRequest.FromString,
                    health_pb2.HealthListResponse.SerializeToString,
                ),
            },
        )

    def close(self) -> None:
        """End the watches; the port is about to close."""
        self._closing.set()

    def status(self, name: str) -> Any:
        """ServingStatus of a name as it is now."""
        reason = self._states().get(name)
        if reason is None:
            return _Status.SERVICE_UNKNOWN
        return _Status.NOT_SERVING if reason else _Status.SERVING

    async def _check(self, request: Any, context: Any) -> Any:
        status = self.status(request.service)
        if status == _Status.SERVICE_UNKNOWN:
            await context.abort(grpc.StatusCode.NOT_FOUND, "This port has no service of that name.")
        return _Status(status=status)

    async def _list(self, _request: Any, _context: Any) -> Any:
        statuses = {name: _Status(status=self.status(name)) for name in self._states()}
        return health_pb2.HealthListResponse(statuses=statuses)

    async def _watch(self, request: Any, context: Any) -> AsyncIterator[Any]:
        if self._watch_count >= self._watch_count_max:
            await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "Too many watches are open; use Check.")
        self._watch_count += 1
        try:
            sent = None
            while True:
                last = self._closing.is_set()
                status = self.status(request.service)
                if status != sent:
                    yield _Status(status=status)
                    sent = status
                if last:
                    return
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._closing.wait(), WATCH_INTERVAL_S)
        finally:
            self._watch_count -= 1
