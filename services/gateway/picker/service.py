"""The endpoint picker as a process: a gateway whose requests come from Envoy over gRPC.

At the end it takes no more requests, lets those under way finish within `gateway.drain_timeout_s`, and cuts off what is
left.
"""

from __future__ import annotations

import socket
from collections.abc import Mapping, Sequence

from mooncache import auth
from mooncache.config import Config
from mooncache.gateway.picker.app import build_picker_app
from mooncache.gateway.picker.server import PROCESSOR_SERVICE, PickerServer
from mooncache.gateway.picker.stream import PickerSetup
from mooncache.gateway.service import GatewayService
from mooncache.gateway.state import GatewayState
from mooncache.proto.v1 import conductor_pb2 as pb
from mooncache.runtime import tls
from mooncache.runtime.grpc_server import address
from mooncache.runtime.logs import Event, get_logger
from mooncache.runtime.service import run_service

_CUT_OFF_S = 1.0

log = get_logger(__name__)


class PickerService(GatewayService):
    """The endpoint picker as a service."""

    serves_http = False
    member_kind = pb.MEMBER_KIND_ENDPOINT_PICKER

    def __init__(self, config: Config) -> None:
        section = config.endpoint_picker
        super().__init__(
            config,
            name="endpoint_picker",
            host=section.host,
            port=section.port,
            metrics_port=section.metrics_port,
        )
        self._port_of_envoy: PickerServer | None = None

    @property
    def target(self) -> str:
        """Address of the port for Envoy; known once it listens."""
        return address(self.config.endpoint_picker.host, self.http_port)

    def health(self) -> Mapping[str, str]:
        """What gRPC's health service tells, also of Envoy's service."""
        return {**super().health(), PROCESSOR_SERVICE: self._readiness()}

    async def _listen(self, state: GatewayState) -> None:
        section = self.config.endpoint_picker
        server = PickerServer(
            build_picker_app(state),
            PickerSetup(self._engine_key, section.fallback_count),
            keys=self._keys if section.key_required else None,
            request_count_max=self.config.gateway.request_count_max,
            health=self.health,
        )
        await server.start(section.host, section.port, tls.server_credentials(self.config.tls))
        self._port_of_envoy, self.http_port = server, server.port
        state.gateway_id = f"{socket.gethostname()[:100]}-{server.port}"
        state.conductor.gateway_id = state.gateway_id
        state.url = (
            f"grpc://{address(self.advertised_host(section.host, section.advertise_host), server.port)}"
        )

    def _engine_key(self, engine_token: str) -> str:
        """Of the token that the engine was started with; of the one that signs when that is not known here."""
        of_engine = [token for token in self.tokens.tokens if token.fingerprint == engine_token]
        return auth.engine_key(of_engine[0] if of_engine else self.token)

    def _keys(self) -> Sequence[str]:
        return [auth.picker_key(token) for token in self.tokens.tokens]

    async def listening(self) -> None:
        log.info(
            Event.PICKER_LISTENING, target=self.target, key_required=self.config.endpoint_picker.key_required
        )

    async def _stop_listening(self) -> None:
        """Close the port; requests that are left are cut off."""
        server, self._port_of_envoy = self._port_of_envoy, None
        if server is not None:
            await server.stop(_CUT_OFF_S)


def run(config: Config) -> int:
    """Be an endpoint picker until a signal; the process' exit status."""
    return run_service("endpoint_picker", config, lambda: PickerService(config))
