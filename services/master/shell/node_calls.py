"""Calls from the master to store nodes: one channel for each node, a bound on calls at once, always a deadline.

Invariant: a channel belongs to one gRPC target; a node that comes back elsewhere gets a new channel.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from google.protobuf.message import Message

from mooncache import errors
from mooncache.master.core.membership import Node
from mooncache.runtime.channel import Channel, Response

ChannelTo = Callable[[str], Channel]


class NodeCalls:
    """Calls to store nodes, bounded in number and time. `channel_to` makes a channel to a gRPC target."""

    def __init__(self, channel_to: ChannelTo, calls_max: int) -> None:
        self._channel_to = channel_to
        self._channels: dict[str, tuple[str, Channel]] = {}
        self._slots = asyncio.Semaphore(calls_max)

    async def call(
        self, node: Node, method: str, request: Message, response_class: type[Response], timeout_s: float
    ) -> Response:
        """Call a node.

        Raises NodeUnavailable (no control endpoint, does not answer), DeadlineExceeded, its refusal.
        """
        target = node.info.endpoints.grpc_target
        if not target:
            raise errors.NodeUnavailable(f"node {node.node_id!r} has no control endpoint")
        try:
            async with asyncio.timeout(timeout_s), self._slots:
                channel = await self._channel(node.node_id, target)
                return await channel.call(method, request, response_class, timeout_s)
        except TimeoutError:
            raise errors.DeadlineExceeded(
                f"node {node.node_id!r} did not finish {method} within {timeout_s:g} s"
            ) from None

    async def forget(self, node_id: str) -> None:
        """Close the channel to a node."""
        known = self._channels.pop(node_id, None)
        if known is not None:
            await known[1].close()

    async def close(self) -> None:
        """Close all channels."""
        for node_id in list(self._channels):
            await self.forget(node_id)

    async def _channel(self, node_id: str, target: str) -> Channel:
        known = self._channels.get(node_id)
        if known is not None and known[0] == target:
            return known[1]
        channel = self._channel_to(target)
        self._channels[node_id] = (target, channel)
        if known is not None:
            await known[1].close()
        return channel
