"""A line to the master for one question: which masters and store nodes there are."""

from __future__ import annotations

import random
from typing import Final

from mooncache.auth import TokenSource
from mooncache.client.master_link import MasterLink, parse_targets
from mooncache.config import Config
from mooncache.proto.v1 import master_pb2
from mooncache.runtime.channel import Channel
from mooncache.runtime.clock import Clock
from mooncache.runtime.grpc_channel import GrpcChannel
from mooncache.runtime.rpc import MASTER_SERVICE
from mooncache.runtime.tls import channel_credentials

_TIMEOUT_S: Final = 3.0
_ATTEMPT_S: Final = 1.0


class PoolStatus:
    """Asks the masters in turn; opened with the first question."""

    def __init__(self, config: Config, token: str | TokenSource, clock: Clock, rng: random.Random) -> None:
        self._config, self._token, self._clock, self._rng = config, token, clock, rng
        self._link: MasterLink | None = None

    async def ask(self) -> master_pb2.GetStatusResponse:
        """The answer of the master that leads, or of any other one. Raises MooncacheError."""
        if self._link is None:
            targets = parse_targets(self._config.cluster.master_targets)
            self._link = MasterLink(targets, self._channel, self._clock, self._rng)
        answer = await self._link.call(
            "GetStatus",
            master_pb2.GetStatusRequest(),
            master_pb2.GetStatusResponse,
            _TIMEOUT_S,
            attempt_s=_ATTEMPT_S,
        )
        if not answer.leading:
            self._link.pass_over()  # a standby knows the masters, not the nodes
        return answer

    async def close(self) -> None:
        """Let go of the line."""
        link, self._link = self._link, None
        if link is not None:
            await link.close()

    def _channel(self, target: str) -> Channel:
        return GrpcChannel(
            target,
            MASTER_SERVICE,
            token=self._token,
            credentials=channel_credentials(self._config.tls),
            server_name=self._config.tls.server_name,
        )
