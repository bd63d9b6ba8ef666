"""Lines to all conductors of the cluster, this one among them: it knows its own address by its own answer."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Final

from mooncache.auth import TokenSource
from mooncache.conductor.core.leadership import NO_ANSWER, NOT_THERE, PeerView, Standing
from mooncache.conductor.messages import STANDINGS
from mooncache.config import Config
from mooncache.errors import ConductorUnavailable, MooncacheError
from mooncache.proto.v1 import conductor_pb2 as pb
from mooncache.runtime import tls
from mooncache.runtime.channel import Channel
from mooncache.runtime.grpc_channel import GrpcChannel
from mooncache.runtime.rpc import CONDUCTOR_SERVICE

PROBE_MAX_S: Final = 0.25
ANNOUNCE_S: Final = 2.0


class Peers:
    """One channel to each conductor, in the order in which they are configured."""

    def __init__(self, targets: Sequence[str], token: str | TokenSource, config: Config) -> None:
        credentials = tls.channel_credentials(config.tls)
        self.targets = tuple(targets)
        self._channels: list[Channel] = [
            GrpcChannel(
                target,
                CONDUCTOR_SERVICE,
                token=token,
                credentials=credentials,
                unavailable_error=ConductorUnavailable,
                server_name=config.tls.server_name,
            )
            for target in self.targets
        ]

    async def look(self, run: int, known_term: int, timeout_s: float) -> list[PeerView]:
        """What each says of itself; never raises MooncacheError. run: this process's number."""
        request = pb.FollowConductorRequest(run=run, known_term=known_term, probe=True)
        timeout_s = min(timeout_s, PROBE_MAX_S)
        return list(
            await asyncio.gather(*(self._probe(at, request, timeout_s) for at in range(len(self.targets))))
        )

    async def follow(
        self, leader: int, request: pb.FollowConductorRequest, timeout_s: float
    ) -> pb.FollowConductorResponse:
        """Ask a leader what has happened. Raises MooncacheError."""
        return await self._channels[leader].call(
            "FollowConductor", request, pb.FollowConductorResponse, timeout_s
        )

    async def announce(self, leader: int, request: pb.AnnounceMemberRequest) -> pb.AnnounceMemberResponse:
        """Tell a leader that this conductor is there. Raises MooncacheError."""
        return await self._channels[leader].call(
            "AnnounceMember", request, pb.AnnounceMemberResponse, ANNOUNCE_S
        )

    async def close(self) -> None:
        """Close every connection."""
        for channel in self._channels:
            await channel.close()

    async def _probe(self, at: int, request: pb.FollowConductorRequest, timeout_s: float) -> PeerView:
        try:
            answer = await self.follow(at, request, timeout_s)
        except ConductorUnavailable:
            return NOT_THERE
        except MooncacheError:
            return NO_ANSWER
        standing = STANDINGS.get(answer.role, Standing.SEEKING)
        return PeerView(standing, answer.term, answer.run == request.run)
