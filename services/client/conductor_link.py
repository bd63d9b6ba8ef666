"""A line to the conductor, for gateways, workers and commands: one target, a deadline on every call.

The conductor's state is soft and there is one of it; nothing here retries. Callers decide what to do without
it.
"""

from __future__ import annotations

from google.protobuf.message import Message

from mooncache.config import Config
from mooncache.errors import ConductorUnavailable
from mooncache.runtime import tls
from mooncache.runtime.channel import Response
from mooncache.runtime.grpc_channel import GrpcChannel
from mooncache.runtime.rpc import CONDUCTOR_SERVICE


class ConductorLink:
    """Calls the conductor from one event loop; the connection is opened by the first call.

    Args:
        target: host:port, as in `cluster.conductor_target`.
        token: the cluster token's text.
        config: for TLS.
    """

    def __init__(self, target: str, token: str, config: Config) -> None:
        self.target = target
        self._channel = GrpcChannel(
            target,
            CONDUCTOR_SERVICE,
            token=token,
            credentials=tls.channel_credentials(config.tls),
            unavailable_error=ConductorUnavailable,
            server_name=config.tls.server_name,
        )

    async def call(
        self, method: str, request: Message, response_class: type[Response], timeout_s: float
    ) -> Response:
        """Call `method` of ConductorService.

        Raises:
            ConductorUnavailable: nothing answers there. DeadlineExceeded: no answer in time.
            MooncacheError: the conductor's own refusal.
        """
        return await self._channel.call(method, request, response_class, timeout_s)

    async def close(self) -> None:
        """Close the connection; calls under way end with Cancelled."""
        await self._channel.close()
