"""The endpoint picker's gRPC port: Envoy's external processing and gRPC's health service.

Envoy cannot make proofs, so it shows a key of its own (`mooncache token --picker`) as a bearer token: what the picker
answers holds the engines' key.
"""

from __future__ import annotations

import hmac
from collections.abc import Callable, Sequence
from typing import Any, Final

import grpc

from mooncache.errors import ConfigInvalid
from mooncache.gateway.picker.stream import PickerSetup, ProcessorStream
from mooncache.gateway.shell.exchange import App
from mooncache.proto.envoy import ext_proc_pb2 as pb
from mooncache.runtime.grpc_channel import MESSAGE_OPTIONS
from mooncache.runtime.grpc_server import address
from mooncache.runtime.health import WATCH_COUNT_MAX, HealthPort, States

PROCESSOR_SERVICE: Final = "envoy.service.ext_proc.v3.ExternalProcessor"
_EOF: Final[Any] = grpc.aio.EOF  # type: ignore[attr-defined]
_SPARE_CALLS: Final = 256  # for health, and for requests that are refused
_OPTIONS: Final = (
    *MESSAGE_OPTIONS,
    ("grpc.so_reuseport", 0),
    ("grpc.max_metadata_size", 16384),
)


class PickerServer:
    """Listens from `start` to `stop`; `port` is the real one.

    Args:
        keys: those that Envoy may show, None for nothing.
        request_count_max: requests that may be under way.
    """

    def __init__(
        self,
        app: App,
        setup: PickerSetup,
        *,
        keys: Callable[[], Sequence[str]] | None,
        request_count_max: int,
        health: States,
    ) -> None:
        self._app, self._setup, self._keys = app, setup, keys
        self._health = HealthPort(health, WATCH_COUNT_MAX)
        self._server = grpc.aio.server(
            options=_OPTIONS, maximum_concurrent_rpcs=request_count_max + _SPARE_CALLS
        )
        self.port = 0
        process = grpc.stream_stream_rpc_method_handler(
            self._process, pb.ProcessingRequest.FromString, pb.ProcessingResponse.SerializeToString
        )
        generic = grpc.method_handlers_generic_handler(PROCESSOR_SERVICE, {"Process": process})
        self._server.add_generic_rpc_handlers((generic, self._health.handler()))

    async def start(self, host: str, port: int, credentials: grpc.ServerCredentials | None) -> None:
        """Listen. Raises ConfigInvalid when the address cannot be had."""
        where = address(host, port)
        try:
            if credentials is None:
                self.port = self._server.add_insecure_port(where)
            else:
                self.port = self._server.add_secure_port(where, credentials)
        except RuntimeError:
            self.port = 0
        if self.port == 0:
            raise ConfigInvalid(
                f"endpoint_picker.host and endpoint_picker.port {where} cannot be opened; choose another port."
            )
        await self._server.start()

    async def stop(self, grace_s: float) -> None:
        """Refuse new streams, give those under way `grace_s` seconds, then cut them off."""
        self._health.close()
        await self._server.stop(grace_s)

    async def _process(self, _requests: object, context: Any) -> None:
        if not self._admitted(context):
            await context.abort(
                grpc.StatusCode.UNAUTHENTICATED,
                "Envoy has to show the picker's key: initial_metadata authorization, Bearer mcx1.…; "
                "`mooncache token --picker` prints it.",
            )

        async def read() -> pb.ProcessingRequest | None:
            message = await context.read()
            return None if message is _EOF else message

        await ProcessorStream(read, context.write, self._setup).serve(self._app)

    def _admitted(self, context: Any) -> bool:
        if self._keys is None:
            return True
        for name, value in context.invocation_metadata() or ():
            if name == "authorization" and isinstance(value, str):
                shown = value.encode()
                fits = [hmac.compare_digest(shown, f"Bearer {key}".encode()) for key in self._keys()]
                return any(fits)
        return False
