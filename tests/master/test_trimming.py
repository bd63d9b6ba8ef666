"""Copies beyond a number go, the last one never; whatever the directory believes and whoever asks at the same time."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mooncache import errors
from mooncache.auth import Token, derive_tenant_key
from mooncache.master.core.placement import Candidate, rank_nodes
from mooncache.master.core.trimming import plan_trims
from mooncache.master.ops import trim_blocks
from mooncache.proto.v1 import master_pb2
from mooncache.testing import virtual_time
from tests.master.simulation.world import BLOCK_BYTES, CLUSTER, KNOWN_KEYS, SimNode, World

KEYS = sorted(KNOWN_KEYS)[:10]
PACKED = b"".join(KEYS)
NODES = [Candidate(f"n{index}", f"h{index}", float(index), index) for index in range(6)]


@given(st.lists(st.lists(st.integers(0, 7), unique=True, max_size=8), max_size=10), st.integers(1, 4))
def test_enough_copies_stay_and_those_that_placement_names_first(
    holders: list[list[int]], count: int
) -> None:
    keys = [bytes([number]) * 32 for number in range(len(holders))]
    trims = {trim.position: trim for trim in plan_trims(keys, holders, NODES, count)}
    for position, (key, where) in enumerate(zip(keys, holders, strict=True)):
        if len(where) <= count:
            assert position not in trims
            continue
        trim = trims[position]
        assert len(trim.stay) == count
        assert sorted(trim.stay + trim.go) == sorted(where)
        ranked = [node.index for node in rank_nodes(key, NODES) if node.index in where]
        assert trim.stay[: len(ranked)] == tuple(ranked[:count]), "clients would look elsewhere first"


@given(
    st.lists(st.lists(st.integers(0, 7), unique=True, max_size=8), max_size=10),
    st.integers(1, 4),
    st.lists(st.integers(0, 7), unique=True, max_size=3),
)
def test_copies_near_the_readers_go_last(holders: list[list[int]], count: int, near: list[int]) -> None:
    keys = [bytes([number]) * 32 for number in range(len(holders))]
    for trim in plan_trims(keys, holders, NODES, count, keep=near):
        wanted = [index for index in near if index in holders[trim.position]]
        assert trim.stay[: len(wanted)] == tuple(wanted[:count])
        assert sorted(trim.stay + trim.go) == sorted(holders[trim.position])


def test_one_node_may_give_up_its_own_copy_only_and_not_the_last() -> None:
    keys = [bytes([number]) * 32 for number in range(4)]
    trims = plan_trims(keys, [[1, 2, 3], [2], [1, 3], [1, 2]], NODES, 1, only=2)
    assert [(trim.position, trim.go) for trim in trims] == [(0, (2,)), (3, (2,))]
    assert trims[1].stay == (1,)
    assert len(trims[0].stay) == 1
    assert trims[0].stay[0] in (1, 3)
    assert plan_trims(keys, [[1, 2]] * 4, NODES, 2, only=2) == [], "two copies are to stay"


async def _world(nodes: int = 4) -> World:
    world = World(5)
    for number in range(nodes):
        node = world.add_node(f"node-{number}")
        for key in KEYS:
            node.put(key)
    await world.converge()
    return world


def _trim(count: int) -> master_pb2.TrimBlocksRequest:
    return master_pb2.TrimBlocksRequest(keys=PACKED, replica_count=count)


def test_copies_beyond_the_number_go() -> None:
    async def scenario() -> None:
        world = await _world()
        done = await world.call("TrimBlocks", _trim(2))
        assert (list(done.codes), done.dropped_count) == ([errors.OK] * 10, 20)
        await world.converge()
        assert len(world.truth()) == 20
        usage = await world.call("GetUsage", master_pb2.GetUsageRequest())
        assert [row.used_bytes for row in usage.tenants] == [20 * BLOCK_BYTES]
        again = await world.call("TrimBlocks", _trim(2))
        assert again.dropped_count == 0
        unknown = await world.call(
            "TrimBlocks", master_pb2.TrimBlocksRequest(keys=b"\xfe" * 32, replica_count=1)
        )
        assert list(unknown.codes) == [errors.NotFound.code]
        for count in (0, 65):
            with pytest.raises(errors.InvalidArgument):
                await world.call("TrimBlocks", _trim(count))
        mine = Token("other", admin=False, key=derive_tenant_key(CLUSTER.key, "other")).text
        other = await world.call("TrimBlocks", _trim(1), token=mine)
        assert set(other.codes) == {errors.NotFound.code}, "blocks of another tenant"
        await world.stop()

    virtual_time.run(scenario(), seed=1)


def test_a_node_asks_for_its_own_copies_until_none_is_left_beside_the_last() -> None:
    async def scenario() -> None:
        world = await _world(3)
        for number, left in enumerate((20, 10, 10)):
            request = master_pb2.TrimBlocksRequest(keys=PACKED, replica_count=1, node_id=f"node-{number}")
            done = await world.call("TrimBlocks", request)
            assert list(done.codes) == [errors.OK] * 10
            await world.converge()
            assert len(world.truth()) == left
            assert {key for _, key in world.truth()} == set(KEYS)
        with pytest.raises(errors.UnknownNode):
            await world.call(
                "TrimBlocks", master_pb2.TrimBlocksRequest(keys=PACKED, replica_count=1, node_id="who")
            )
        many = master_pb2.TrimBlocksRequest(keys=PACKED, replica_count=1, keep_node_ids=["x"] * 65)
        with pytest.raises(errors.InvalidArgument):
            await world.call("TrimBlocks", many)
        await world.stop()

    virtual_time.run(scenario(), seed=1)


def test_what_a_node_gives_up_and_another_one_has_to_fetch_is_spare_there(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The directory is behind: the copy that stays was dropped a moment ago."""
    real, spare = SimNode._copy_blocks, []

    async def watched(self: SimNode, state: object, request: Any, context: object) -> object:
        answer: Any = await real(self, state, request, context)
        spare.extend(request.spare for code in answer.codes if code == errors.OK)
        return answer

    monkeypatch.setattr(SimNode, "_copy_blocks", watched)

    async def scenario() -> None:
        world = await _world(2)
        for key in KEYS:
            world.nodes["node-1"].drop(key)
        mine = master_pb2.TrimBlocksRequest(keys=PACKED, replica_count=1, node_id="node-0")
        assert (await world.call("TrimBlocks", mine)).dropped_count == 10
        assert spare == [True] * 10
        await world.converge()
        again = await world.call("TrimBlocks", mine)
        assert set(again.codes) == {errors.NotFound.code}, "it holds none now"
        assert {key for _, key in world.truth()} == set(KEYS)
        await world.stop()

    virtual_time.run(scenario(), seed=1)


def test_copies_stay_where_they_are_to_be_kept() -> None:
    async def scenario() -> None:
        world = await _world()
        keep = master_pb2.TrimBlocksRequest(keys=PACKED, replica_count=1, keep_node_ids=["gone", "node-2"])
        assert (await world.call("TrimBlocks", keep)).dropped_count == 30
        await world.converge()
        assert {name for name, _ in world.truth()} == {"node-2"}
        await world.stop()

    virtual_time.run(scenario(), seed=1)


def test_many_keys_are_trimmed_in_parts_and_answered_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trim_blocks, "KEYS_AT_ONCE", 3)

    async def scenario() -> None:
        world = await _world(2)
        request = master_pb2.TrimBlocksRequest(keys=PACKED[:32] + b"\xfe" * 32 + PACKED[32:], replica_count=1)
        done = await world.call("TrimBlocks", request)
        assert list(done.codes) == [errors.OK, errors.NotFound.code, *[errors.OK] * 9]
        assert done.dropped_count == 10
        await world.stop()

    virtual_time.run(scenario(), seed=1)


def test_a_directory_that_is_behind_costs_no_block() -> None:
    """The copies that should stay were evicted a moment ago: they are fetched again before the others go."""

    async def scenario() -> None:
        world = await _world()
        for key in KEYS:
            stays = rank_nodes(key, world.master.state.candidates())[0]
            world.nodes[stays.node_id].drop(key)
        done = await world.call("TrimBlocks", _trim(1))
        assert list(done.codes) == [errors.OK] * 10
        await world.converge()
        assert sorted(key for _, key in world.truth()) == KEYS
        await world.stop()

    virtual_time.run(scenario(), seed=1)


def test_two_at_once_leave_a_copy() -> None:
    async def scenario() -> None:
        world = await _world(6)
        await asyncio.gather(*(world.call("TrimBlocks", _trim(count)) for count in (1, 2, 1, 3)))
        await world.converge()
        assert {key for _, key in world.truth()} == set(KEYS)
        await world.stop()

    virtual_time.run(scenario(), seed=1)


def test_a_node_that_cannot_be_asked_keeps_everybody_elses_copies() -> None:
    async def scenario() -> None:
        world = await _world(2)
        silent = next(iter(world.nodes.values()))
        world.network.partition({silent.node_id}, {world.leader})
        done = await world.call("TrimBlocks", _trim(1), timeout_s=1.0)
        assert any(done.codes), "a node did not answer"
        world.network.heal()
        await world.converge()
        assert {key for _, key in world.truth()} == set(KEYS)
        await world.stop()

    virtual_time.run(scenario(), seed=1)


def test_a_node_that_lost_its_memory_after_it_confirmed_costs_no_block(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One node confirms and is started again, empty, while another one is still asked."""
    real = SimNode._copy_blocks

    async def slow(self: SimNode, state: object, request: Any, context: object) -> object:
        if self.node_id == "node-1":
            await asyncio.sleep(0.1)
            other = self.world.nodes["node-0"]
            await other.restart()
            await asyncio.sleep(1.5)
            assert other.registered
        return await real(self, state, request, context)

    monkeypatch.setattr(SimNode, "_copy_blocks", slow)

    async def scenario() -> None:
        world = await _world(2)
        done = await world.call("TrimBlocks", _trim(1), timeout_s=10.0)
        assert set(done.codes) == {errors.OK, errors.NodeUnavailable.code}
        await world.converge()
        assert {key for _, key in world.truth()} == set(KEYS)
        await world.stop()

    virtual_time.run(scenario(), seed=1)
