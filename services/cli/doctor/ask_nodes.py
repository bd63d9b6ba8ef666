"""Asks every store node at once: its host, its clock, its counters, and which others it reaches."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from typing import Final

from mooncache.cli.doctor.core.facts import ClockOffset, NodeFacts, Reach
from mooncache.client.options import ClientOptions
from mooncache.errors import MooncacheError, NodeUnavailable, PermissionDenied
from mooncache.proto.v1 import common_pb2, store_node_pb2
from mooncache.runtime.grpc_channel import GrpcChannel
from mooncache.runtime.rpc import STORE_NODE_SERVICE
from mooncache.runtime.tls import channel_credentials
from mooncache.topology.core.host_facts import HostFacts, from_json

PEERS_MAX: Final = 16
"""Others that each node tries: with more nodes each is tried by this many, not by all."""
_PEER_S: Final = 2.0


async def ask_nodes(
    options: ClientOptions, nodes: Sequence[common_pb2.NodeInfo], timeout_s: float
) -> tuple[NodeFacts, ...]:
    """One `NodeFacts` for each node, within `timeout_s`; what a node says of itself only."""
    asked = (_ask(options, node, peers_of(nodes, at), timeout_s) for at, node in enumerate(nodes))
    return tuple(await asyncio.gather(*asked))


def peers_of(nodes: Sequence[common_pb2.NodeInfo], at: int) -> list[common_pb2.NodeInfo]:
    """The nodes behind the one at `at`, in a ring, so that each is tried equally often."""
    count = min(PEERS_MAX, len(nodes) - 1)
    return [nodes[(at + step) % len(nodes)] for step in range(1, count + 1)]


async def _ask(
    options: ClientOptions, node: common_pb2.NodeInfo, peers: list[common_pb2.NodeInfo], timeout_s: float
) -> NodeFacts:
    target = node.endpoints.grpc_target
    if not target:
        return NodeFacts(node.node_id)  # the master shows control ports to the cluster token alone
    channel = GrpcChannel(
        target,
        STORE_NODE_SERVICE,
        token=options.token,
        credentials=channel_credentials(options.tls),
        unavailable_error=NodeUnavailable,
        server_name=options.tls.server_name,
    )
    try:
        return await _asked(channel, node.node_id, peers, timeout_s)
    finally:
        await channel.close()


async def _asked(
    channel: GrpcChannel, node_id: str, peers: list[common_pb2.NodeInfo], timeout_s: float
) -> NodeFacts:
    first_s = min(_PEER_S, timeout_s)
    began_s, wall_s = time.monotonic(), time.time()
    try:
        status = await channel.call(
            "GetNodeStatus",
            store_node_pb2.GetNodeStatusRequest(),
            store_node_pb2.GetNodeStatusResponse,
            first_s,
        )
    except PermissionDenied:
        return NodeFacts(node_id)  # it answers; only the cluster token may ask for more
    except MooncacheError as error:
        return NodeFacts(node_id, error=error.message)
    passed_s = time.monotonic() - began_s
    clock = clock_of(status.wall_ms / 1e3, wall_s, passed_s) if status.wall_ms else None
    left_s = max(0.5, timeout_s - passed_s)
    host, reach = await asyncio.gather(_host(channel, left_s), _reach(channel, peers, left_s))
    return NodeFacts(
        node_id,
        clock=clock,
        host=host,
        counters=dict(status.counters),
        reach=reach,
        uptime_s=status.uptime_ms / 1e3,
    )


async def _host(channel: GrpcChannel, timeout_s: float) -> HostFacts | None:
    """The node's host; None of a node that is too old to say."""
    try:
        answer = await channel.call(
            "Diagnose", store_node_pb2.DiagnoseRequest(), store_node_pb2.DiagnoseResponse, timeout_s
        )
        return from_json(answer.host_json)
    except (MooncacheError, ValueError):
        return None


def clock_of(their_wall_s: float, our_wall_s: float, round_trip_s: float) -> ClockOffset:
    """The offset of a clock that was read somewhere within a round trip which began at `our_wall_s`."""
    bound_s = round_trip_s / 2
    return ClockOffset(their_wall_s - (our_wall_s + bound_s), bound_s)


async def _reach(
    channel: GrpcChannel, peers: list[common_pb2.NodeInfo], timeout_s: float
) -> dict[str, Reach]:
    if not peers:
        return {}
    peer_ms = int(min(_PEER_S, timeout_s * 0.7) * 1e3)
    request = store_node_pb2.DiagnoseRequest(peers=peers, timeout_ms=peer_ms)
    try:
        answer = await channel.call("Diagnose", request, store_node_pb2.DiagnoseResponse, timeout_s)
    except MooncacheError:
        return {}
    return {one.node_id: Reach(one.control_message, one.data_message, one.data_ms) for one in answer.peers}
