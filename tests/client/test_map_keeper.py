"""The map of a client: newer maps win, a lost master changes nothing, a new one does not empty the map."""

from __future__ import annotations

import asyncio
import contextlib
import random
from functools import partial
from typing import Any

import pytest

from mooncache.client.map_keeper import MapKeeper, carry_over, is_newer, view_of_map
from mooncache.client.master_link import MasterLink
from mooncache.client.results import ClusterView, NodeView
from mooncache.client.terms import PATIENCE_S
from mooncache.errors import MasterUnavailable, MooncacheError, NotLeader, Unauthenticated
from mooncache.proto.v1 import common_pb2, master_pb2
from tests import conditions

# The clock of these tests moves with each turn of the event loop, so they look at each turn.
until = partial(conditions.until, every_s=0.0)


class FastClock:
    def __init__(self) -> None:
        self.time_s = 0.0

    def now_s(self) -> float:
        return self.time_s

    def wall_s(self) -> float:
        return self.time_s

    async def sleep(self, delay_s: float) -> None:
        self.time_s += max(0.0, delay_s)
        await asyncio.sleep(0)


class Script:
    """A channel that answers what the test wants next."""

    def __init__(self) -> None:
        self.map = make_map(1, 1, "n1", "n2")
        self.error: MooncacheError | None = None
        self.clock: FastClock | None = None
        self.calls = 0

    async def close(self) -> None:
        pass

    async def call(self, method: str, request: Any, _response_class: type, timeout_s: float) -> Any:
        self.calls += 1
        await asyncio.sleep(0)
        if self.error is not None:
            raise self.error
        if method == "GetClusterMap":
            return master_pb2.GetClusterMapResponse(map=self.map)
        known = (request.known_term, request.known_epoch)
        if known == (self.map.term, self.map.epoch):
            if self.clock is not None:
                self.clock.time_s += request.wait_ms / 1000.0
            return master_pb2.WatchClusterMapResponse(changed=False)
        return master_pb2.WatchClusterMapResponse(changed=True, map=self.map)


def make_map(term: int, epoch: int, *names: str) -> common_pb2.ClusterMap:
    nodes = [
        common_pb2.NodeInfo(index=i, node_id=name, state=common_pb2.NODE_STATE_ACTIVE, weight=1.0)
        for i, name in enumerate(names)
    ]
    return common_pb2.ClusterMap(term=term, epoch=epoch, leader="a:1", nodes=nodes)


def names(view: ClusterView) -> list[str]:
    return [node.node_id for node in view.nodes]


def test_maps_are_ordered_by_term_and_epoch() -> None:
    old, new = view_of_map(make_map(1, 9)), view_of_map(make_map(2, 1))
    assert is_newer(new, old)
    assert not is_newer(old, new)
    assert not is_newer(old, old)


def test_a_state_from_the_future_counts_as_suspect() -> None:
    cluster_map = make_map(1, 1, "n1")
    cluster_map.nodes[0].state = common_pb2.NODE_STATE_UNSPECIFIED
    assert view_of_map(cluster_map).nodes[0].state == "suspect"


@pytest.mark.parametrize(
    ("segments", "tier", "arena"),
    [
        ([], "dram", ""),
        ([(common_pb2.TIER_HBM, "gpu")], "hbm", "gpu"),
        ([(common_pb2.TIER_UNSPECIFIED, "")], "dram", ""),
        ([(common_pb2.TIER_HBM, "gpu"), (common_pb2.TIER_DRAM, "dax")], "dram", "dax"),
        ([(9, "new")], "tier-8", "new"),
    ],
)
def test_a_node_has_the_tier_of_its_slowest_memory(
    segments: list[tuple[int, str]], tier: str, arena: str
) -> None:
    cluster_map = make_map(1, 1, "n1")
    cluster_map.nodes[0].segments.extend(
        common_pb2.Segment(tier=number, kind=kind)  # type: ignore[arg-type]
        for number, kind in segments
    )
    node = view_of_map(cluster_map).nodes[0]
    assert (node.tier, node.arena) == (tier, arena)


def test_carried_nodes_get_indices_of_their_own() -> None:
    old = view_of_map(make_map(1, 1, "n1", "n2", "n3"))
    fresh = view_of_map(make_map(2, 1, "n3"))
    merged = carry_over(fresh, old.nodes)
    assert sorted(names(merged)) == ["n1", "n2", "n3"]
    assert len({node.index for node in merged.nodes}) == 3
    dead = NodeView(5, "n9", "", 0, "dead", "", 0, "")
    assert names(carry_over(fresh, [dead])) == ["n3"]


def make_keeper(script: Script) -> tuple[MapKeeper, list[ClusterView], FastClock]:
    clock = FastClock()
    script.clock = clock
    applied: list[ClusterView] = []
    link = MasterLink(["a:1"], lambda _target: script, clock, random.Random(1))
    return MapKeeper(link, applied.append, clock, random.Random(2)), applied, clock


@contextlib.asynccontextmanager
async def running(keeper: MapKeeper) -> Any:
    task = asyncio.create_task(keeper.run())
    try:
        yield
        assert not task.done()
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


async def test_changes_are_followed_and_a_lost_master_changes_nothing() -> None:
    script = Script()
    keeper, applied, _ = make_keeper(script)
    assert names(await keeper.fetch(1.0)) == ["n1", "n2"]
    async with running(keeper):
        script.map = make_map(1, 2, "n1", "n2", "n3")
        await until(lambda: names(keeper.view) == ["n1", "n2", "n3"])
        script.error = MasterUnavailable("gone")
        await until(lambda: keeper.last_error is not None)
        assert names(keeper.view) == ["n1", "n2", "n3"]
        script.error, script.map = None, make_map(1, 1, "old")
        await until(lambda: keeper.last_error is None)
        assert names(keeper.view) == ["n1", "n2", "n3"], "an older map is not taken"
    assert len(applied) == 2


async def test_a_new_master_does_not_empty_the_map_at_once() -> None:
    script = Script()
    keeper, _, clock = make_keeper(script)
    await keeper.fetch(1.0)
    async with running(keeper):
        script.map = make_map(2, 1)
        await until(lambda: keeper.view.term == 2)
        assert sorted(names(keeper.view)) == ["n1", "n2"]
        script.map = make_map(2, 2, "n2")
        await until(lambda: keeper.view.epoch == 2)
        assert sorted(names(keeper.view)) == ["n1", "n2"]
        start_s = clock.now_s()
        await until(lambda: names(keeper.view) == ["n2"])
        assert clock.now_s() - start_s >= 5


async def test_an_unreachable_master_is_bounded_and_a_refusal_is_immediate() -> None:
    script = Script()
    keeper, _, clock = make_keeper(script)
    script.error = NotLeader("standby")
    with pytest.raises(MasterUnavailable, match="a:1"):
        await keeper.fetch(3.0)
    assert clock.now_s() <= 3.0
    script.error = Unauthenticated("wrong token")
    before_s = clock.now_s()
    with pytest.raises(Unauthenticated):
        await keeper.fetch(3.0)
    assert clock.now_s() == before_s


async def test_a_master_with_an_older_term_is_asked_seldom_and_followed_when_it_stays() -> None:
    script = Script()
    script.map = make_map(9, 1, "n1", "n2")
    keeper, applied, clock = make_keeper(script)
    await keeper.fetch(1.0)
    async with running(keeper):
        await until(lambda: script.calls > 1)
        script.map = make_map(2, 1, "n7", "n1")
        begin_s, calls = clock.now_s(), script.calls
        await until(lambda: keeper.last_error is not None)
        assert isinstance(keeper.last_error, NotLeader)
        assert keeper.view.term == 9
        await until(lambda: keeper.view.term == 2)
        assert clock.now_s() - begin_s >= PATIENCE_S
        assert script.calls - calls <= 40
        assert keeper.last_error is None
    assert names(applied[-1]) == ["n7", "n1", "n2"], (
        "nodes that the new life has not heard of are carried over"
    )
