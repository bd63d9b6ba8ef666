"""What a node can say of its host and of the way to other nodes, for `Diagnose`.

Peers are tried with clients of their own, made for one trial and closed after it: what they find must not depend on
what the node's other connections went through.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import dataclasses
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Final, Protocol

from mooncache.auth import DEFAULT_TENANT
from mooncache.client.map_keeper import view_of_node
from mooncache.client.native_call import call_native
from mooncache.client.results import MapNodeState
from mooncache.errors import NodeUnavailable
from mooncache.proto.v1 import common_pb2, store_node_pb2
from mooncache.runtime.channel import Channel
from mooncache.store_node.copier import ClientFor, map_entry
from mooncache.topology.core.host_facts import HostFacts

if TYPE_CHECKING:
    from mooncache._native import Client as NativeClient

_THREADS: Final = 32
_ROUND_TRIPS: Final = 4


class Surroundings(Protocol):
    """What `Diagnose` asks; each trial ends within its time."""

    def describe(self) -> HostFacts: ...
    async def call(self, peer: common_pb2.NodeInfo, timeout_s: float) -> float: ...
    async def ping(self, peer: common_pb2.NodeInfo, timeout_s: float) -> float: ...
    async def round_trip(self, peer: common_pb2.NodeInfo, timeout_s: float) -> float: ...


class HostSurroundings:
    """The host's own, over the network. `close` it.

    Args:
        describe: looks at the host; may block.
        client_for: see NativeCopier.
        channel_for: a channel to the control port of a node.
    """

    def __init__(
        self, describe: Callable[[], HostFacts], client_for: ClientFor, channel_for: Callable[[str], Channel]
    ) -> None:
        self._describe = describe
        self._client_for = client_for
        self._channel_for = channel_for
        self._pool = concurrent.futures.ThreadPoolExecutor(_THREADS, thread_name_prefix="mooncache-reach")

    def describe(self) -> HostFacts:
        """The host as it is now. Blocks."""
        return self._describe()

    async def call(self, peer: common_pb2.NodeInfo, timeout_s: float) -> float:
        """Seconds that a control call took. Raises MooncacheError when it did not succeed."""
        target = peer.endpoints.grpc_target
        if not target:
            raise NodeUnavailable("The cluster map has no control port of it.")
        channel = self._channel_for(target)
        began_s = time.monotonic()
        try:
            answer = await channel.call(
                "GetNodeStatus",
                store_node_pb2.GetNodeStatusRequest(),
                store_node_pb2.GetNodeStatusResponse,
                timeout_s,
            )
        finally:
            await channel.close()
        if answer.node_id != peer.node_id:
            raise NodeUnavailable(f"Another node answers at {target}: {answer.node_id}.")
        return time.monotonic() - began_s

    async def ping(self, peer: common_pb2.NodeInfo, timeout_s: float) -> float:
        """What it took to connect to the data port and to have an answer, in seconds. Raises MooncacheError."""
        return await asyncio.get_running_loop().run_in_executor(self._pool, self._ping, peer, timeout_s, 0)

    async def round_trip(self, peer: common_pb2.NodeInfo, timeout_s: float) -> float:
        """The shortest of a few round trips over one connection to the data port, in seconds. Raises MooncacheError."""
        return await asyncio.get_running_loop().run_in_executor(
            self._pool, self._ping, peer, timeout_s, _ROUND_TRIPS
        )

    def _ping(self, peer: common_pb2.NodeInfo, timeout_s: float, more: int) -> float:
        """The first answer, or the shortest of `more` after it."""
        client: NativeClient = self._client_for(DEFAULT_TENANT)
        try:
            view = dataclasses.replace(view_of_node(peer), index=0, state=MapNodeState.ACTIVE, weight=1.0)
            call_native(client.set_map, 1, [map_entry(view)])
            first = float(call_native(client.ping, 0, timeout_s))
            return min((float(call_native(client.ping, 0, timeout_s)) for _ in range(more)), default=first)
        finally:
            client.close()

    def close(self) -> None:
        """End the threads."""
        self._pool.shutdown(wait=False, cancel_futures=True)
