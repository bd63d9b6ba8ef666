"""Tries of peers by a node: what the master names is tried, what came of it goes out once."""

from __future__ import annotations

import asyncio
import contextlib
from functools import partial

from mooncache.errors import NodeUnavailable
from mooncache.proto.v1 import common_pb2
from mooncache.store_node.background import try_peers
from mooncache.store_node.peer_trials import PeerTrials
from mooncache.topology.core.host_facts import HostFacts
from tests.conditions import until


class Ways:
    """Other nodes, and how far they are."""

    def __init__(self, **took_s: float) -> None:
        self.took_s = took_s
        self.tried: list[str] = []

    def has_tried(self, count: int) -> bool:
        return len(self.tried) == count

    def describe(self) -> HostFacts:
        raise NotImplementedError

    async def call(self, peer: common_pb2.NodeInfo, timeout_s: float) -> float:
        raise NotImplementedError

    async def ping(self, peer: common_pb2.NodeInfo, timeout_s: float) -> float:
        raise NotImplementedError

    async def round_trip(self, peer: common_pb2.NodeInfo, timeout_s: float) -> float:
        assert timeout_s == try_peers.TIMEOUT_S
        self.tried.append(peer.node_id)
        if peer.node_id not in self.took_s:
            raise NodeUnavailable("It does not answer.")
        return self.took_s[peer.node_id]


async def test_a_wish_becomes_one_result() -> None:
    trials, ways = PeerTrials(), Ways(b=0.000_25, c=1e-9, d=1e6)
    duty = asyncio.create_task(try_peers.run(trials, ways))
    try:
        results = {"b": 250, "gone": 0, "c": 1, "d": (1 << 32) - 1}
        for number, (name, took_us) in enumerate(results.items(), 1):
            assert trials.take() is None
            trials.wish(common_pb2.NodeInfo(node_id=name))
            await until(partial(ways.has_tried, number), "it is tried")
            await asyncio.sleep(0)
            result = trials.take()
            assert result is not None
            assert (result.node_id, result.round_trip_us) == (name, took_us)
    finally:
        duty.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await duty


async def test_only_the_newest_wish_counts() -> None:
    trials = PeerTrials()
    for name in "abc":
        trials.wish(common_pb2.NodeInfo(node_id=name))
    assert (await trials.next()).node_id == "c"
    waiting = asyncio.create_task(trials.next())
    await asyncio.sleep(0)
    assert not waiting.done()
    trials.wish(common_pb2.NodeInfo(node_id="d"))
    assert (await waiting).node_id == "d"
