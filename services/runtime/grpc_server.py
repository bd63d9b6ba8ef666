"""The gRPC port of a service: a generic handler for each RPC of the table, all ending in OpRunner; health, reflection.

No servicer classes: a handler looks at the caller's proof, passes raw bytes and metadata on, and turns a
MooncacheError into status, text and the trailing metadata `mooncache-code`. Every answer to a caller that proved
itself is proven too (proof.py). Message sizes and the number of calls under way are capped by the
library.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Awaitable, Callable
from typing import Any, Final

import grpc

from mooncache.auth import Token, ValidTokens
from mooncache.config import GrpcSection
from mooncache.errors import OK, ConfigInvalid, MooncacheError, Unauthenticated, to_metadata
from mooncache.runtime import tracing
from mooncache.runtime.bind import is_loopback
from mooncache.runtime.clock import Clock
from mooncache.runtime.grpc_channel import KEEPALIVE_MS, MESSAGE_OPTIONS
from mooncache.runtime.grpc_status import to_library
from mooncache.runtime.health import SERVICE_NAME as HEALTH_NAME
from mooncache.runtime.health import WATCH_COUNT_MAX, HealthPort, States
from mooncache.runtime.proof import STALE, Admitted, Gate, digest
from mooncache.runtime.reflection import STREAM_COUNT_MAX, ReflectionPort
from mooncache.runtime.rpc import RpcTable
from mooncache.runtime.run_op import TIMEOUT_DEFAULT_S, OpRunner

_DETAILS_CHARS_MAX: Final = 1000  # details travel in headers, whose size the other end limits
_OPTIONS: Final = (
    *MESSAGE_OPTIONS,
    ("grpc.http2.min_recv_ping_interval_without_data_ms", KEEPALIVE_MS // 2),
    ("grpc.so_reuseport", 0),  # a second process on the same port is a mistake, not a load balancer
    ("grpc.max_metadata_size", 16384),
)

Behaviour = Callable[[bytes, object], Awaitable[bytes]]


def address(host: str, port: int) -> str:
    """host:port as gRPC wants it; IPv6 in brackets."""
    try:
        if ipaddress.ip_address(host).version == 6:
            return f"[{host}]:{port}"
    except ValueError:
        pass
    return f"{host}:{port}"


class GrpcServer:
    """Listens from `start` to `stop`; `port` is the real one.

    Args:
        cluster: what callers prove that they know.
        health: what the port says of its services to a caller without a token.
        settings: what it takes from callers beside proofs.
        process: what every process answers beside its own service.
    """

    def __init__(
        self,
        runner: OpRunner,
        cluster: Token | ValidTokens,
        clock: Clock,
        *,
        call_count_max: int,
        health: States,
        settings: GrpcSection | None = None,
        process: RpcTable | None = None,
    ) -> None:
        self._runner = runner
        self._cluster, self._clock = cluster, clock
        self._settings = settings or GrpcSection()
        self._gate = Gate(cluster, clock.now_s)
        # Streams of strangers leave most of the places to control calls.
        self._health = HealthPort(health, min(WATCH_COUNT_MAX, call_count_max // 4))
        self._reflection = ReflectionPort(
            [runner.table.service_name, HEALTH_NAME],
            self._admit_reflection,
            min(STREAM_COUNT_MAX, call_count_max // 8),
        )
        self._reflection_open = False
        self._server = grpc.aio.server(options=_OPTIONS, maximum_concurrent_rpcs=call_count_max)
        self.port = 0
        handlers = {
            name: grpc.unary_unary_rpc_method_handler(self._behaviour(runner, name))
            for name in runner.table.ops
        }
        generic = grpc.method_handlers_generic_handler(runner.table.service_name, handlers)
        self._server.add_generic_rpc_handlers((generic, self._health.handler()))
        if process is not None:
            beside = OpRunner(process, clock)
            handlers = {
                name: grpc.unary_unary_rpc_method_handler(self._behaviour(beside, name))
                for name in process.ops
            }
            generic = grpc.method_handlers_generic_handler(process.service_name, handlers)
            self._server.add_generic_rpc_handlers((generic,))
        if self._settings.reflection != "off":
            self._server.add_generic_rpc_handlers(tuple(self._reflection.handlers()))

    async def start(self, host: str, port: int, credentials: grpc.ServerCredentials | None) -> None:
        """Listen. Raises ConfigInvalid when the address cannot be had."""
        where = address(host, port)
        secure = credentials is not None
        self._gate = Gate(self._cluster, self._clock.now_s, bearer=secure and self._settings.bearer)
        asked = self._settings.reflection
        self._reflection_open = asked == "open" or (asked == "auto" and is_loopback(host))
        try:
            if credentials is None:
                self.port = self._server.add_insecure_port(where)
            else:
                self.port = self._server.add_secure_port(where, credentials)
        except RuntimeError:
            self.port = 0
        if self.port == 0:
            raise ConfigInvalid(
                f"The control port {where} cannot be opened; is another process using it? Port 0 means any free port."
            )
        await self._server.start()

    async def stop(self, grace_s: float) -> None:
        """Refuse new calls, give those under way `grace_s` seconds, then cut them off; streams end at once."""
        self._health.close()
        self._reflection.close()
        await self._server.stop(grace_s)

    async def _admit_reflection(self, context: Any, path: str) -> None:
        """A stream has no bytes to sign when it begins: its proof is over an empty request."""
        if self._reflection_open:
            return
        admitted = self._gate.admit(_metadata(context).get("authorization", ""), path, await digest(b""))
        if admitted.stale:
            await _abort(context, admitted, Unauthenticated(admitted.refusal), STALE)
        try:
            admitted.identify()
        except Unauthenticated as error:
            await _abort(context, admitted, error, error.code)

    def _behaviour(self, runner: OpRunner, method: str) -> Behaviour:
        path = runner.table.ops[method].method.path

        async def behave(request: bytes, context: Any) -> bytes:
            metadata = _metadata(context)
            left_s = context.time_remaining()
            admitted = self._gate.admit(metadata.get("authorization", ""), path, await digest(request))
            if admitted.stale:
                await _abort(context, admitted, Unauthenticated(admitted.refusal), STALE)
            try:
                with tracing.span(path[1:], metadata, kind="server", root=False, rpc__system="grpc"):
                    response = await runner.run(
                        method,
                        request,
                        identify=admitted.identify,
                        request_id=metadata.get("x-request-id", ""),
                        timeout_s=TIMEOUT_DEFAULT_S if left_s is None else left_s,
                    )
            except MooncacheError as error:
                await _abort(context, admitted, error, error.code)
                raise
            answer = response.SerializeToString()
            context.set_trailing_metadata(admitted.seal(OK, await digest(answer)))
            return answer

        return behave


def _metadata(context: Any) -> dict[str, str]:
    return {key: value for key, value in context.invocation_metadata() or () if isinstance(value, str)}


async def _abort(context: Any, admitted: Admitted, error: MooncacheError, code: int) -> None:
    details = error.message[:_DETAILS_CHARS_MAX]
    sealed = admitted.seal(code, await digest(details.encode()))
    await context.abort(to_library(error.grpc_status), details, (*to_metadata(error), *sealed))
