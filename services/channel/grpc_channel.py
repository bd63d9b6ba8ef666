"""Channel over gRPC: token and request id in the metadata, always a deadline, errors from the catalogue."""

from __future__ import annotations

import asyncio
from typing import Any, Final

import grpc
import structlog
from google.protobuf.descriptor import ServiceDescriptor
from google.protobuf.message import DecodeError, Message

from mooncache import tracing
from mooncache.errors import (
    Cancelled,
    Closed,
    DeadlineExceeded,
    InvalidArgument,
    MasterUnavailable,
    MooncacheError,
    ProtocolError,
    Unsupported,
    from_grpc,
)
from mooncache.rpc import methods_of
from mooncache.run_op import new_request_id

MESSAGE_BYTES_MAX: Final = 64 << 20
_ENVELOPE_BYTES: Final = 1 << 20  # fields around the 64 MiB of records that a report may carry
GRACE_S: Final = 1.0

MESSAGE_OPTIONS: Final[tuple[tuple[str, int], ...]] = (
    ("grpc.max_receive_message_length", MESSAGE_BYTES_MAX + _ENVELOPE_BYTES),
    ("grpc.max_send_message_length", MESSAGE_BYTES_MAX + _ENVELOPE_BYTES),
)
_CHANNEL_OPTIONS: Final[tuple[tuple[str, int], ...]] = (
    *MESSAGE_OPTIONS,
    # A peer that restarts should be found again within a heartbeat or two, not after gRPC's two minutes.
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 2000),  # time for one connection attempt, despite its name
    ("grpc.max_reconnect_backoff_ms", 2000),
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.enable_http_proxy", 0),
)


class GrpcChannel:
    """See Channel. One event loop; the connection is opened by the first call.

    Args:
        target: "host:port" of the service.
        service: descriptor, for example rpc.MASTER_SERVICE.
        token: cluster or tenant token; sent as `authorization: Bearer`.
        credentials: TLS credentials (tls.channel_credentials), None for plain text.
        unavailable_error: class raised when nobody answers there (MasterUnavailable or NodeUnavailable).
        server_name: name to check the certificate against when it is not the host of `target`.
    """

    def __init__(
        self,
        target: str,
        service: ServiceDescriptor,
        *,
        token: str,
        credentials: grpc.ChannelCredentials | None = None,
        unavailable_error: type[MooncacheError] = MasterUnavailable,
        server_name: str = "",
    ) -> None:
        self.target = target
        self._methods = methods_of(service)
        self._authorization = f"Bearer {token}"
        self._credentials = credentials
        self._unavailable_error = unavailable_error
        self._options: list[tuple[str, Any]] = list(_CHANNEL_OPTIONS)
        if server_name:
            self._options.append(("grpc.ssl_target_name_override", server_name))
        self._channel: grpc.aio.Channel | None = None
        self._calls: dict[str, Any] = {}
        self._closed = False

    async def call(self, method: str, request: Message, timeout_s: float) -> Any:
        """See Channel.call."""
        if method not in self._methods:
            raise Unsupported(f"there is no method {method} to call")
        if timeout_s <= 0:
            raise DeadlineExceeded(f"{method} to {self.target} was not sent: no time was left.")
        call = self._callable(method)
        span = tracing.span(
            self._methods[method].path[1:],
            kind="client",
            root=False,
            rpc__system="grpc",
            server__address=self.target,
        )
        with span:
            return await self._call(call, method, request, timeout_s)

    async def _call(self, call: Any, method: str, request: Message, timeout_s: float) -> Any:
        context = structlog.contextvars.get_contextvars()
        metadata = (
            ("authorization", self._authorization),
            ("x-request-id", str(context.get("request_id") or new_request_id())),
            *tracing.inject({}).items(),
        )
        try:
            # gRPC's own deadline fires first; the outer one makes sure that a stuck library cannot hold a
            # caller.
            async with asyncio.timeout(timeout_s + GRACE_S):
                return await call(request, timeout=timeout_s, metadata=metadata)
        except grpc.aio.AioRpcError as error:
            raise self._error(method, timeout_s, error) from None
        except TimeoutError:
            raise DeadlineExceeded(
                f"{method} to {self.target} did not finish within {timeout_s:g} s."
            ) from None
        except DecodeError:
            raise ProtocolError(
                f"{self.target} answered {method} with bytes that are no {method}Response."
            ) from None
        except asyncio.CancelledError:
            if self._closed and not _cancelling():
                raise Cancelled(f"The channel to {self.target} was closed during {method}.") from None
            raise
        except (grpc.aio.UsageError, grpc.aio.InternalError, ValueError, TypeError) as error:
            raise InvalidArgument(f"{method} to {self.target} could not be sent: {error}") from error

    async def close(self) -> None:
        """See Channel.close."""
        self._closed = True
        self._calls.clear()
        channel, self._channel = self._channel, None
        if channel is not None:
            await channel.close(grace=None)

    def _callable(self, method: str) -> Any:
        if self._closed:
            raise Closed(f"The channel to {self.target} is closed.")
        if self._channel is None:
            if self._credentials is None:
                self._channel = grpc.aio.insecure_channel(self.target, options=self._options)
            else:
                self._channel = grpc.aio.secure_channel(self.target, self._credentials, options=self._options)
        if method not in self._calls:
            described = self._methods[method]
            self._calls[method] = self._channel.unary_unary(
                described.path,
                request_serializer=lambda message: message.SerializeToString(),
                response_deserializer=described.response_class.FromString,
            )
        return self._calls[method]

    def _error(self, method: str, timeout_s: float, error: grpc.aio.AioRpcError) -> MooncacheError:
        metadata: Any = error.trailing_metadata() or ()
        trailing = [(str(key), value) for key, value in metadata]
        mapped = from_grpc(error.code(), error.details(), trailing, self._unavailable_error)
        from_service = any(key == "mooncache-code" for key, _ in trailing)
        if from_service:
            return mapped
        if isinstance(mapped, DeadlineExceeded):
            return DeadlineExceeded(f"{method} to {self.target} did not finish within {timeout_s:g} s.")
        return type(mapped)(f"{self.target} did not answer {method}: {mapped.message}")


def _cancelling() -> bool:
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0
