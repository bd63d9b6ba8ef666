"""The few calls of etcd's v3 API that coordination needs, each with a deadline, over any of several servers.

A call that fails because its server is silent or gone turns to the next server for the *next* call; it is not repeated
here, because only the caller knows whether repeating is safe. Keep-alive is a stream in etcd's API; one stream
is opened for each keep-alive, so that every renewal has a deadline of its own and a stuck stream cannot hide.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Final, TypeVar

import grpc
from google.protobuf.message import Message

from mooncache.errors import (
    Closed,
    ConfigInvalid,
    Internal,
    MasterUnavailable,
    MooncacheError,
    Unauthenticated,
)
from mooncache.proto.etcd import etcd_pb2 as pb
from mooncache.runtime.grpc_channel import KEEPALIVE_OPTIONS
from mooncache.runtime.tasks import is_cancelling

_OPTIONS: Final[list[tuple[str, object]]] = [
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 2000),  # time for one connection attempt, despite its name
    ("grpc.max_reconnect_backoff_ms", 1000),
    *KEEPALIVE_OPTIONS,  # etcd takes a ping every five seconds
    ("grpc.enable_http_proxy", 0),
    ("grpc.use_local_subchannel_pool", 1),
]
_GRACE_S: Final = 0.5
T = TypeVar("T")
Response = TypeVar("Response", bound=Message)
_SILENT: Final = frozenset({grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED})
_NO_MAJORITY: Final = "context "
"""How the words begin with which a member without a majority ends a call at its deadline; their status is UNKNOWN."""


class EtcdApi:
    """Calls raise MasterUnavailable when the server does not answer, Unauthenticated when it refuses the user."""

    def __init__(
        self,
        endpoints: Sequence[str],
        credentials: grpc.ChannelCredentials | None = None,
        user: str = "",
        password: str = "",
    ) -> None:
        if not endpoints:
            raise ConfigInvalid("coordination.etcd_endpoints is empty; it names the etcd servers, host:port.")
        self._endpoints = list(endpoints)
        self._credentials = credentials
        self._user, self._password = user, password
        self._token = ""
        self._current = 0
        self._channel: grpc.aio.Channel | None = None
        self._closed = False

    @property
    def endpoint(self) -> str:
        """Server that the next call goes to."""
        return self._endpoints[self._current]

    async def range(self, request: pb.RangeRequest, timeout_s: float) -> pb.RangeResponse:
        """Read a key or a range."""
        return await self._unary("KV/Range", request, pb.RangeResponse, timeout_s)

    async def put(self, request: pb.PutRequest, timeout_s: float) -> pb.PutResponse:
        """Write a key."""
        return await self._unary("KV/Put", request, pb.PutResponse, timeout_s)

    async def txn(self, request: pb.TxnRequest, timeout_s: float) -> pb.TxnResponse:
        """Compare and then act, in one step."""
        return await self._unary("KV/Txn", request, pb.TxnResponse, timeout_s)

    async def lease_grant(self, ttl_s: int, timeout_s: float) -> pb.LeaseGrantResponse:
        """Begin a lease."""
        return await self._unary(
            "Lease/LeaseGrant", pb.LeaseGrantRequest(ttl=ttl_s), pb.LeaseGrantResponse, timeout_s
        )

    async def lease_revoke(self, lease: int, timeout_s: float) -> None:
        """End a lease; its keys go with it. A lease that is gone already is fine."""
        try:
            await self._unary(
                "Lease/LeaseRevoke", pb.LeaseRevokeRequest(id=lease), pb.LeaseRevokeResponse, timeout_s
            )
        except Internal:
            return

    async def lease_keep_alive(self, lease: int, timeout_s: float) -> int:
        """Renew a lease; its time to live in seconds, 0 when it is gone."""

        async def requests() -> AsyncIterator[pb.LeaseKeepAliveRequest]:
            yield pb.LeaseKeepAliveRequest(id=lease)

        async def renew() -> int:
            stream = self._open().stream_stream(
                "/etcdserverpb.Lease/LeaseKeepAlive",
                request_serializer=_serialize,
                response_deserializer=pb.LeaseKeepAliveResponse.FromString,
            )
            call = stream(requests(), timeout=timeout_s, metadata=self._metadata())
            try:
                answer = await call.read()
            finally:
                call.cancel()
            return int(answer.ttl) if isinstance(answer, pb.LeaseKeepAliveResponse) else 0

        return await self._guarded("LeaseKeepAlive", renew, timeout_s)

    async def close(self) -> None:
        """Let go of the connection."""
        self._closed = True
        await self._drop_channel()

    async def _unary(
        self, path: str, request: Message, response_class: type[Response], timeout_s: float
    ) -> Response:
        async def attempt() -> Response:
            call = self._open().unary_unary(
                f"/etcdserverpb.{path}",
                request_serializer=_serialize,
                response_deserializer=response_class.FromString,
            )
            answer: Response = await call(request, timeout=timeout_s, metadata=self._metadata())
            return answer

        return await self._guarded(path, attempt, timeout_s)

    async def _guarded(self, what: str, attempt: Callable[[], Awaitable[T]], timeout_s: float) -> T:
        """Run one attempt under its deadline; log in (again) first or after a refusal when there is a user."""
        if self._closed:
            raise Closed("The connection to etcd is closed.")
        endpoint = self.endpoint
        try:
            async with asyncio.timeout(timeout_s + _GRACE_S):
                if self._user and not self._token:
                    await self._log_in(timeout_s)
                try:
                    return await attempt()
                except grpc.aio.AioRpcError as error:
                    if not self._user or "invalid auth token" not in (error.details() or ""):
                        raise
                    self._token = ""
                    await self._log_in(timeout_s)
                    return await attempt()
        except grpc.aio.AioRpcError as error:
            raise await self._mapped(what, endpoint, error) from None
        except asyncio.CancelledError:
            if is_cancelling():
                raise
            # Another call turned to the next member, and gRPC cancels what was under way on that connection.
            raise MasterUnavailable(
                f"etcd at {endpoint} was given up while it was asked for {what}."
            ) from None
        except TimeoutError:
            await self._turn_from(endpoint)
            raise MasterUnavailable(
                f"etcd at {endpoint} did not answer {what} within {timeout_s:g} s."
            ) from None

    async def _mapped(self, what: str, endpoint: str, error: grpc.aio.AioRpcError) -> MooncacheError:
        status, details = error.code(), error.details() or ""
        if status in _SILENT or (status is grpc.StatusCode.UNKNOWN and details.startswith(_NO_MAJORITY)):
            await self._turn_from(endpoint)
            return MasterUnavailable(f"etcd at {endpoint} did not answer {what}: {details}")
        if (
            status in (grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.PERMISSION_DENIED)
            or "user name" in details
        ):
            return Unauthenticated(f"etcd at {endpoint} refused {what}: {details}")
        return Internal(f"etcd at {endpoint} failed {what}: {status.name} {details}")

    async def _log_in(self, timeout_s: float) -> None:
        call = self._open().unary_unary(
            "/etcdserverpb.Auth/Authenticate",
            request_serializer=_serialize,
            response_deserializer=pb.AuthenticateResponse.FromString,
        )
        answer = await call(
            pb.AuthenticateRequest(name=self._user, password=self._password), timeout=timeout_s
        )
        self._token = answer.token

    def _metadata(self) -> tuple[tuple[str, str], ...]:
        return (("token", self._token),) if self._token else ()

    def _open(self) -> grpc.aio.Channel:
        if self._channel is None:
            if self._credentials is None:
                self._channel = grpc.aio.insecure_channel(self.endpoint, options=_OPTIONS)
            else:
                self._channel = grpc.aio.secure_channel(self.endpoint, self._credentials, options=_OPTIONS)
        return self._channel

    async def _turn_from(self, endpoint: str) -> None:
        """To the next member, unless another call has done so."""
        if len(self._endpoints) > 1 and endpoint == self.endpoint:
            self._current = (self._current + 1) % len(self._endpoints)
            self._token = ""
            await self._drop_channel()

    async def _drop_channel(self) -> None:
        channel, self._channel = self._channel, None
        if channel is not None:
            await channel.close(grace=None)


def _serialize(message: Message) -> bytes:
    return message.SerializeToString()


def prefix_end(prefix: bytes) -> bytes:
    """End of the range of all keys that begin with a prefix."""
    trimmed = prefix.rstrip(b"\xff")
    return trimmed[:-1] + bytes([trimmed[-1] + 1]) if trimmed else b"\0"
