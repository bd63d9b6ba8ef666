"""A node follows the cluster map and hands it to its native server, which answers native clients."""

from __future__ import annotations

import asyncio
import contextlib
import random
from typing import Any, cast

import pytest

from mooncache import _native
from mooncache.client.map_keeper import view_of_map
from mooncache.client.master_link import MasterLink
from mooncache.client.native_call import call_native
from mooncache.errors import InvalidArgument, MasterUnavailable, MooncacheError
from mooncache.proto.v1 import common_pb2
from mooncache.store_node.background import follow_map
from mooncache.store_node.state import StoreNodeState
from tests.client.test_map_keeper import FastClock, Script, make_map, until

Row = tuple[int, int, list[str]]


class Followed:
    """The duty of a node whose master is a script; `rows` is what the native server would have got."""

    def __init__(self, script: Script, *, refused: bool = False) -> None:
        clock = FastClock()
        script.clock = clock
        link = MasterLink(["a:1"], lambda _: cast("Any", script), clock, random.Random(1))
        self.state = StoreNodeState(
            identity=cast("Any", None),
            core=cast("Any", None),
            endpoints=common_pb2.Endpoints(),
            segments=[],
            clock=clock,
            rng=random.Random(1),
            link=link,
        )
        self.rows: list[Row] = []
        self.refused = refused

    def publish(self, term: int, epoch: int, nodes: list[dict[str, object]]) -> None:
        self.rows.append((term, epoch, [str(node["node_id"]) for node in nodes]))
        if self.refused:
            raise InvalidArgument("too large")

    async def __aenter__(self) -> Followed:
        self.task = asyncio.create_task(follow_map.run(self.state, self.publish))
        return self

    async def __aexit__(self, *_: object) -> None:
        self.task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self.task


def test_each_map_is_published_as_the_master_made_it() -> None:
    async def scenario() -> list[Row]:
        script = Script()
        async with Followed(script) as node:
            await until(lambda: node.rows)
            script.error = MasterUnavailable("away")
            calls = script.calls
            await until(lambda: script.calls > calls + 3)
            script.map, script.error = make_map(2, 1, "n2"), None  # a new master, which has heard of one node
            await until(lambda: node.rows[-1][0] == 2)
            return node.rows

    assert asyncio.run(scenario())[:2] == [(1, 1, ["n1", "n2"]), (2, 1, ["n2"])]


def test_a_map_that_the_data_plane_refuses_does_not_end_the_duty() -> None:
    async def scenario() -> None:
        script = Script()
        async with Followed(script, refused=True) as node:
            await until(lambda: node.rows)
            script.map = make_map(1, 2, "n1")
            await until(lambda: len(node.rows) >= 2)

    asyncio.run(scenario())


def test_the_native_server_takes_every_field_and_refuses_what_is_none() -> None:
    cluster_map = make_map(3, 4, "n1")
    cluster_map.nodes[0].labels["zone"] = "a"
    cluster_map.nodes[0].endpoints.tcp_port = 7801
    nodes = follow_map.nodes_of(view_of_map(cluster_map))
    assert nodes[0]["labels"] == [("zone", "a")]
    server = _native.StoreServer({"secret": bytes(32), "capacity_bytes": 4 << 20, "huge_pages": False})

    def take(term: int, epoch: int, rows: list[dict[str, object]]) -> None:
        call_native(server.set_cluster_map, term, epoch, rows)

    take(3, 4, nodes)
    take(3, 5, [{**nodes[0], "state": "of a newer master"}])
    take(3, 6, [])
    wrong: list[dict[str, object]] = [
        {"weight": float("nan")},
        {"weight": "much"},
        {"index": -1},
        {"tcp_host": "h" * 5000},
        {"labels": [("a", "b")] * 17},
    ]
    for part in wrong:
        with pytest.raises(MooncacheError):
            take(3, 7, [{**nodes[0], **part}])
    with pytest.raises(InvalidArgument):
        take(3, 7, [{"index": 1}])
