"""Whoever holds the cluster's token may send a store node any command: it is carried out, or refused by a code."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator
from typing import Any

import pytest
import structlog
from hypothesis import HealthCheck, given, settings

from mooncache import _native
from mooncache.auth import derive_tenant_key
from mooncache.client.map_keeper import view_of_node
from mooncache.client.native_call import call_native
from mooncache.proto.v1 import common_pb2
from mooncache.runtime import logs
from mooncache.runtime.clock import LoopClock
from mooncache.runtime.rpc import STORE_NODE_SERVICE, RpcTable
from mooncache.runtime.run_op import OpRunner
from mooncache.store_node.copier import NativeCopier
from mooncache.store_node.identity import NodeIdentity
from mooncache.store_node.service import HANDLERS
from mooncache.store_node.state import StoreNodeState
from tests.hostile.test_any_request import Steps, requests, send

SECRET = b"any command".ljust(32, b".")
BLOCK = bytes(32)
KNOWN = {
    "tenant": ["default"],
    "keys": [BLOCK, BLOCK + bytes([1]) * 32],
    "tenant_id": [0, 1],
    "incarnation": [7, 0],
    "term": [0, 1],
    "timeout_ms": [50],
    "ttl_ms": [1, 1000],
    "tcp_host": ["127.0.0.1"],
    "tcp_port": [1],
    "unix_path": ["", "/nowhere/node.sock"],
}


@pytest.fixture(scope="module", autouse=True)
def quiet_logs() -> Iterator[None]:
    logs.setup("test", level="critical")
    yield
    structlog.reset_defaults()
    structlog.contextvars.clear_contextvars()


@pytest.fixture(scope="module")
def server() -> Iterator[Any]:
    native = _native.StoreServer({"secret": SECRET, "capacity_bytes": 16 << 20, "incarnation": 7})
    native.start()
    yield native
    native.stop(1.0)
    assert native.check() == ""
    assert native.stats()["store_pins"] == 0, "of blocks that are not there nothing is pinned"


def node_of(server: Any, copier: NativeCopier, own: common_pb2.Endpoints) -> StoreNodeState:
    return StoreNodeState(
        identity=NodeIdentity("node", "host", 7, "test", 0),
        core=server,
        endpoints=own,
        segments=[],
        clock=LoopClock(),
        rng=random.Random(1),
        link=None,
        copier=copier,
    )


@settings(max_examples=40, suppress_health_check=[HealthCheck.too_slow])
@given(requests(STORE_NODE_SERVICE, KNOWN))
def test_a_store_node_carries_out_or_refuses(server: Any, steps: Steps) -> None:
    found = server.endpoints()
    own = common_pb2.Endpoints(tcp_host=found["tcp_host"], tcp_port=found["tcp_port"])

    def client_for(tenant: str) -> Any:
        return call_native(_native.Client, {"key": derive_tenant_key(SECRET, tenant), "tenant": tenant})

    async def run() -> None:
        here = view_of_node(common_pb2.NodeInfo(node_id="node", host_id="host", incarnation=7, endpoints=own))
        copier = NativeCopier(here, client_for, concurrency=1)
        state = node_of(server, copier, own)
        try:
            table = RpcTable(STORE_NODE_SERVICE, state, HANDLERS, admin_only=tuple(HANDLERS))
            await send(OpRunner(table, state.clock), steps, timeout_s=0.4)
        finally:
            state.set_draining(False)
            copier.close()

    asyncio.run(run())
