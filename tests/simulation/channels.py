"""The real code's gRPC channels, replaced by channels of the simulated network while a world lives."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

from google.protobuf.descriptor import ServiceDescriptor

from mooncache.errors import MasterUnavailable, MooncacheError
from tests.simulation.network import CLUSTER, SimNetwork
from tests.simulation.scheduler import current_process

_PLACES = (
    "mooncache.client.conductor_link.GrpcChannel",
    "mooncache.conductor.shell.peers.GrpcChannel",
    "mooncache.conductor.shell.copies.GrpcChannel",
    "mooncache.conductor.shell.pool_status.GrpcChannel",
)


@contextlib.contextmanager
def simulated(network: SimNetwork) -> Iterator[None]:
    """Links of conductors, workers and gateways use this network; the process that makes one is its source."""

    def channel(
        target: str,
        service: ServiceDescriptor,
        *,
        token: str,
        credentials: object = None,
        unavailable_error: type[MooncacheError] = MasterUnavailable,
        server_name: str = "",
    ) -> Any:
        source = current_process().name
        return network.channel(
            source, target, service, token=CLUSTER.text, unavailable_error=unavailable_error
        )

    with contextlib.ExitStack() as stack:
        for place in _PLACES:
            stack.enter_context(mock.patch(place, channel))
        yield
