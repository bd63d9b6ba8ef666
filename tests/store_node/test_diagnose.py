"""Diagnose on a real node: peers that answer, that are gone, that are others, and too many of them."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from mooncache.auth import create_cluster_token
from mooncache.config import load
from mooncache.errors import InvalidArgument
from mooncache.proto.v1 import common_pb2
from mooncache.proto.v1 import store_node_pb2 as pb
from mooncache.runtime.grpc_channel import GrpcChannel
from mooncache.runtime.rpc import STORE_NODE_SERVICE
from mooncache.store_node.service import StoreNodeService
from mooncache.topology.core.host_facts import from_json
from tests.ports import own_port

ARENA_BYTES = 16 << 20


@pytest.fixture
async def node(tmp_path: Path) -> AsyncIterator[StoreNodeService]:
    create_cluster_token(tmp_path / "cluster.token")
    settings = {
        "cluster.state_dir": tmp_path,
        "cluster.master_targets": (f"127.0.0.1:{own_port()}",),
        "store_node.node_id": "n1",
        "store_node.capacity_bytes": ARENA_BYTES,
        "metrics.enabled": False,
    }
    service = StoreNodeService(load(env={}, overrides=settings))
    await service.start()
    yield service
    await service.stop()


def peer(node: StoreNodeService, name: str, **endpoints: object) -> common_pb2.NodeInfo:
    """The node itself under a name, with other endpoints."""
    state = node.state
    found = common_pb2.NodeInfo(
        node_id=name,
        host_id="another host",
        incarnation=state.identity.incarnation,
        endpoints=state.endpoints,
    )
    found.endpoints.unix_path = ""
    for field, value in endpoints.items():
        setattr(found.endpoints, field, value)
    return found


async def test_peers_and_host(node: StoreNodeService) -> None:
    channel = GrpcChannel(node.grpc_target, STORE_NODE_SERVICE, token=node.token.text)
    peers = [
        peer(node, "n1"),
        peer(node, "n2"),
        peer(node, "gone", grpc_target=f"127.0.0.1:{own_port()}", tcp_port=own_port()),
        peer(node, "half", tcp_port=own_port()),
    ]
    request = pb.DiagnoseRequest(peers=peers, timeout_ms=3000)
    answer = await channel.call("Diagnose", request, pb.DiagnoseResponse, 20.0)
    await channel.close()
    found = {one.node_id: one for one in answer.peers}
    assert [one.node_id for one in answer.peers] == ["n1", "n2", "gone", "half"]
    assert (found["n1"].control_code, found["n1"].data_code) == (0, 0)
    assert found["n1"].data_ms > 0
    assert "Another node answers" in found["n2"].control_message, "n1 answers there"
    assert found["gone"].control_code
    assert found["gone"].data_code
    assert (found["half"].data_code != 0, found["half"].data_message != "") == (True, True)
    host = from_json(answer.host_json)
    assert (host.arena.size_bytes, host.arena.kind) == (ARENA_BYTES, "memory")
    assert [file.mode for file in host.private_files] == [0o600]


async def test_too_many_peers_are_refused(node: StoreNodeService) -> None:
    channel = GrpcChannel(node.grpc_target, STORE_NODE_SERVICE, token=node.token.text)
    request = pb.DiagnoseRequest(peers=[common_pb2.NodeInfo()] * 257)
    with pytest.raises(InvalidArgument):
        await channel.call("Diagnose", request, pb.DiagnoseResponse, 20.0)
    await channel.close()
