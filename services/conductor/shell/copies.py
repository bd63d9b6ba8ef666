"""Asking the master to bring blocks to a number of copies: more as a task of its own, fewer at once."""

from __future__ import annotations

import random
from collections.abc import Sequence

from google.protobuf.message import Message

from mooncache.auth import TokenSource
from mooncache.client.master_link import MasterLink, parse_targets
from mooncache.config import Config
from mooncache.proto.v1 import master_pb2
from mooncache.runtime.channel import Channel, Response
from mooncache.runtime.clock import Clock
from mooncache.runtime.grpc_channel import GrpcChannel
from mooncache.runtime.rpc import MASTER_SERVICE
from mooncache.runtime.tls import channel_credentials

_TIMEOUT_S = 5.0
_ATTEMPT_S = 2.0


class Copies:
    """A line to the master, opened with the first order."""

    def __init__(self, config: Config, token: str | TokenSource, clock: Clock) -> None:
        self._config = config
        self._token = token
        self._clock = clock
        self._link: MasterLink | None = None

    async def order(
        self, keys: bytes, copies: int, near: Sequence[str] = (), tenant: str = "", *, term: int = 0
    ) -> str:
        """Have packed keys on `copies` nodes, on those in `near` first; return the master's task.

        term: of the leadership that orders it; a master that knows a newer one refuses with NotLeader.
        The new copies are spare: nodes let them go when they are not read for a while. Raises MooncacheError.
        """
        request = master_pb2.ReplicateBlocksRequest(
            keys=keys,
            replica_count=copies,
            target_node_ids=near,
            spare=True,
            tenant=tenant,
            conductor_term=term,
        )
        answer = await self._call("ReplicateBlocks", request, master_pb2.ReplicateBlocksResponse)
        return str(answer.task_id)

    async def trim(
        self, keys: bytes, copies: int, near: Sequence[str] = (), tenant: str = "", *, term: int = 0
    ) -> int:
        """Leave `copies` copies of packed keys, those in `near` last; return how many were dropped.

        Raises MooncacheError.
        """
        request = master_pb2.TrimBlocksRequest(
            keys=keys, replica_count=copies, keep_node_ids=near, tenant=tenant, conductor_term=term
        )
        answer = await self._call("TrimBlocks", request, master_pb2.TrimBlocksResponse)
        return int(answer.dropped_count)

    async def close(self) -> None:
        """Let go of the line."""
        link, self._link = self._link, None
        if link is not None:
            await link.close()

    async def _call(self, method: str, request: Message, response_class: type[Response]) -> Response:
        if self._link is None:
            targets = parse_targets(self._config.cluster.master_targets)
            self._link = MasterLink(targets, self._channel, self._clock, random.Random())
        return await self._link.call(method, request, response_class, _TIMEOUT_S, attempt_s=_ATTEMPT_S)

    def _channel(self, target: str) -> Channel:
        return GrpcChannel(
            target,
            MASTER_SERVICE,
            token=self._token,
            credentials=channel_credentials(self._config.tls),
            server_name=self._config.tls.server_name,
        )
