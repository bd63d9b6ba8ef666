"""Channel over gRPC: a proof of the token and a request id in the metadata, always a deadline, errors from the
catalogue. An answer without a proof (proof.py) is never believed."""

from __future__ import annotations

import asyncio
import os
import weakref
from collections.abc import Callable
from typing import Any, Final

import grpc
from google.protobuf.descriptor import ServiceDescriptor
from google.protobuf.message import DecodeError, Message

from mooncache.auth import TokenSource
from mooncache.errors import METADATA_KEY as CODE_KEY
from mooncache.errors import (
    OK,
    Cancelled,
    Closed,
    DeadlineExceeded,
    InvalidArgument,
    MasterUnavailable,
    MooncacheError,
    ProtocolError,
    Unauthenticated,
    Unsupported,
    from_grpc,
)
from mooncache.runtime import tracing
from mooncache.runtime.channel import Response
from mooncache.runtime.forks import leave_to_parent
from mooncache.runtime.grpc_status import of_library
from mooncache.runtime.plain_structlog import structlog
from mooncache.runtime.proof import METADATA_KEY as PROOF_KEY
from mooncache.runtime.proof import STALE, Prover, SignedCall, digest
from mooncache.runtime.rpc import check_method, methods_of
from mooncache.runtime.run_op import new_request_id
from mooncache.runtime.tasks import is_cancelling

MESSAGE_BYTES_MAX: Final = 64 << 20
_ENVELOPE_BYTES: Final = 1 << 20  # fields around the 64 MiB of records that a report may carry
GRACE_S: Final = 1.0
KEEPALIVE_MS: Final = 10_000
_ATTEMPTS: Final = 3  # one without a nonce, one with it, one more when the nonce changed in between
_LEAST_S: Final = 0.001
_CODE_DIGITS_MAX: Final = 5

MESSAGE_OPTIONS: Final[tuple[tuple[str, int], ...]] = (
    ("grpc.max_receive_message_length", MESSAGE_BYTES_MAX + _ENVELOPE_BYTES),
    ("grpc.max_send_message_length", MESSAGE_BYTES_MAX + _ENVELOPE_BYTES),
)
KEEPALIVE_OPTIONS: Final[tuple[tuple[str, int], ...]] = (
    # A connection that no longer passes anything, of which neither end learns, is asked for while a call waits on it,
    # and given up without an answer. Without this the kernel may send again and again for a quarter of an hour. The
    # last one is for a ping that gRPC itself had sent; it would have a minute, and the others wait for it.
    ("grpc.keepalive_time_ms", KEEPALIVE_MS),
    ("grpc.keepalive_timeout_ms", KEEPALIVE_MS),
    ("grpc.http2.ping_timeout_ms", KEEPALIVE_MS),
)
_CHANNEL_OPTIONS: Final[tuple[tuple[str, int], ...]] = (
    *MESSAGE_OPTIONS,
    # A peer that restarts should be found again within a heartbeat or two, not after gRPC's two minutes.
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 2000),  # time for one connection attempt, despite its name
    ("grpc.max_reconnect_backoff_ms", 2000),
    *KEEPALIVE_OPTIONS,
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.enable_http_proxy", 0),
)

RawCall = Callable[..., Any]
"""gRPC's callable of one method, of bytes; the library has no types."""


class GrpcChannel:
    """A `Channel` over gRPC. One event loop; the connection is opened by the first call.

    Args:
        target: "host:port" of the service.
        service: descriptor, for example rpc.MASTER_SERVICE.
        token: cluster or tenant token, or where it comes from at each call; it is proven, never sent.
        credentials: TLS credentials (tls.channel_credentials), None for plain text.
        unavailable_error: class raised when nothing answers there (MasterUnavailable or NodeUnavailable).
        server_name: name to check the certificate against when it is not the host of `target`.
    """

    def __init__(
        self,
        target: str,
        service: ServiceDescriptor,
        *,
        token: str | TokenSource,
        credentials: grpc.ChannelCredentials | None = None,
        unavailable_error: type[MooncacheError] = MasterUnavailable,
        server_name: str = "",
    ) -> None:
        self.target = target
        self._methods = methods_of(service)
        self._prover = Prover(token)
        self._credentials = credentials
        self._unavailable_error = unavailable_error
        self._options: list[tuple[str, Any]] = list(_CHANNEL_OPTIONS)
        if server_name:
            self._options.append(("grpc.ssl_target_name_override", server_name))
        self._channel: grpc.aio.Channel | None = None
        self._calls: dict[str, RawCall] = {}
        self._under_way: set[grpc.aio.Call] = set()
        self._closed = False

    async def call(
        self, method: str, request: Message, response_class: type[Response], timeout_s: float
    ) -> Response:
        """Call one method; the contract is `Channel.call`."""
        check_method(self._methods, method, response_class)
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
            return await self._call(call, method, request, response_class, timeout_s)

    async def _call(
        self,
        call: RawCall,
        method: str,
        request: Message,
        response_class: type[Response],
        timeout_s: float,
    ) -> Response:
        loop = asyncio.get_running_loop()
        deadline_s = loop.time() + timeout_s
        described = self._methods[method]
        try:
            data = request.SerializeToString()
            request_digest = await digest(data)
            # gRPC's own deadline fires first; the outer one makes sure that a stuck library cannot hold a
            # caller.
            async with asyncio.timeout(timeout_s + GRACE_S):
                for _ in range(_ATTEMPTS):
                    signed = self._prover.sign(described.path, request_digest)
                    answer = await self._attempt(call, method, data, signed, deadline_s - loop.time())
                    if answer is not None:
                        return response_class.FromString(answer)
            raise Unauthenticated(
                f"{self.target} rejected every proof for {method} as stale; the call was not carried out."
            )
        except TimeoutError:
            raise DeadlineExceeded(
                f"{method} to {self.target} did not finish within {timeout_s:g} s."
            ) from None
        except DecodeError:
            raise ProtocolError(
                f"{self.target} answered {method} with bytes that are not a {method}Response."
            ) from None
        except asyncio.CancelledError:
            if self._closed and not is_cancelling():
                raise Cancelled(f"The channel to {self.target} was closed during {method}.") from None
            raise
        except (grpc.aio.UsageError, grpc.aio.InternalError, ValueError, TypeError) as error:
            raise InvalidArgument(f"{method} to {self.target} could not be sent: {error}") from error

    async def _attempt(
        self, call: RawCall, method: str, data: bytes, signed: SignedCall, timeout_s: float
    ) -> bytes | None:
        """The response's bytes; None when the service wants another proof and has done nothing."""
        context = structlog.contextvars.get_contextvars()
        metadata = (
            ("authorization", signed.authorization),
            ("x-request-id", str(context.get("request_id") or new_request_id())),
            *tracing.inject({}).items(),
        )
        try:
            under_way = call(data, timeout=max(timeout_s, _LEAST_S), metadata=metadata)
            self._under_way.add(under_way)
            try:
                answer: bytes = await under_way
                trailing = _texts(await under_way.trailing_metadata())
            finally:
                self._under_way.discard(under_way)
        except grpc.aio.AioRpcError as error:
            if await self._wants_another(signed, error):
                return None
            raise await self._error(method, timeout_s, signed, error) from None
        if not self._prover.proves(signed, OK, await digest(answer), trailing.get(PROOF_KEY, "")):
            raise self._stranger(method)
        return answer

    async def close(self) -> None:
        """Close the channel; calls in flight end with an error."""
        self._closed = True
        self._calls.clear()
        channel, self._channel = self._channel, None
        if channel is not None:
            await channel.close(grace=None)

    def leave_to_parent(self) -> None:
        """In a forked child: this channel is closed here, and nothing is written to its socket."""
        for thing in (self._channel, *self._under_way):
            leave_to_parent(thing)
        self._closed, self._channel = True, None

    def _callable(self, method: str) -> RawCall:
        if self._closed:
            raise Closed(f"The channel to {self.target} is closed.")
        if self._channel is None:
            _forks.check(self.target)
            _forks.open.add(self)
            if self._credentials is None:
                self._channel = grpc.aio.insecure_channel(self.target, options=self._options)
            else:
                self._channel = grpc.aio.secure_channel(self.target, self._credentials, options=self._options)
        if method not in self._calls:
            described = self._methods[method]
            self._calls[method] = self._channel.unary_unary(described.path, None, None)  # bytes
        return self._calls[method]

    async def _wants_another(self, signed: SignedCall, error: grpc.aio.AioRpcError) -> bool:
        if error.code() is not grpc.StatusCode.UNAUTHENTICATED:
            return False
        proof = _texts(error.trailing_metadata()).get(PROOF_KEY, "")
        return self._prover.proves(signed, STALE, await digest((error.details() or "").encode()), proof)

    async def _error(
        self, method: str, timeout_s: float, signed: SignedCall, error: grpc.aio.AioRpcError
    ) -> MooncacheError:
        trailing = _texts(error.trailing_metadata())
        mapped = from_grpc(
            of_library(error.code()), error.details(), trailing.items(), self._unavailable_error
        )
        if CODE_KEY in trailing:
            said = await digest((error.details() or "").encode())
            if isinstance(mapped, Unauthenticated):
                return mapped  # who does not know our token cannot prove anything to us
            code = trailing[CODE_KEY]
            number = int(code) if code.isascii() and code.isdigit() and len(code) <= _CODE_DIGITS_MAX else OK
            known = self._prover.proves(signed, number, said, trailing.get(PROOF_KEY, ""))
            return mapped if known else self._stranger(method)
        if isinstance(mapped, DeadlineExceeded):
            return DeadlineExceeded(f"{method} to {self.target} did not finish within {timeout_s:g} s.")
        return type(mapped)(f"{self.target} did not answer {method}: {mapped.message}")

    def _stranger(self, method: str) -> Unauthenticated:
        return Unauthenticated(
            f"{self.target} answered {method} without proving that it knows this cluster's token. Check that the "
            "address is right and that both ends run the same version; the answer was thrown away."
        )


class _Forks:
    """gRPC lives in the first process that uses it: a child has its locks and its state, but none of its threads."""

    def __init__(self) -> None:
        self.open: weakref.WeakSet[GrpcChannel] = weakref.WeakSet()
        self._used = self._parent_used = False
        os.register_at_fork(after_in_child=self._in_child)

    def _in_child(self) -> None:
        self._parent_used = self._parent_used or self._used
        channels, self.open = list(self.open), weakref.WeakSet()
        for channel in channels:
            channel.leave_to_parent()

    def check(self, target: str) -> None:
        """Raises Unsupported in a child that gRPC does not work in: calls would hang there, or end the process."""
        if self._parent_used:
            raise Unsupported(
                f"{target} cannot be called here: this process was forked from one that had called a service already, "
                "and gRPC does not outlive fork(). Fork before the first client is made, start workers with "
                '"spawn" or "forkserver", or name the store nodes (nodes=[...]): they are reached without gRPC.'
            )
        self._used = True


_forks = _Forks()


def _texts(metadata: Any) -> dict[str, str]:
    return {str(key): value for key, value in metadata or () if isinstance(value, str)}
