"""Whatever happened, when the network is whole again the directory is the union of the nodes' contents.

A failing seed is in the message; `MOONCACHE_SIM_SEED=<seed>` runs just that one.
"""

from __future__ import annotations

import os
from collections.abc import Callable

import pytest

from mooncache import _native, errors
from mooncache.auth import Token, derive_tenant_key
from mooncache.kvcache.block_index import BlockIndex
from mooncache.proto.v1 import common_pb2, master_pb2
from mooncache.testing import virtual_time
from tests.master.model_index import ModelIndex
from tests.master.simulation.world import BLOCK_BYTES, CLUSTER, KNOWN_KEYS, World

SEEDS_EACH = 8
FIXED = os.environ.get("MOONCACHE_SIM_SEED")
STARTS = [int(FIXED)] if FIXED else range(0, 240, SEEDS_EACH)
BATCHES = [range(start, start + (1 if FIXED else SEEDS_EACH)) for start in STARTS]
KEYS = sorted(KNOWN_KEYS)


async def trouble(seed: int, make_index: Callable[[], BlockIndex] = ModelIndex) -> None:
    """A minute of random events on a bad network, then calm."""
    world = World(seed, make_index)
    rng = world.rng
    names = [f"node-{n}" for n in range(rng.randrange(1, 6))]
    for name in names:
        world.add_node(name)
    await world.clock.sleep(rng.choice([0.0, 0.5, 3.0]))
    world.bad_network()
    for _ in range(rng.randrange(20, 60)):
        node = world.nodes[rng.choice(names)]
        dice = rng.random()
        if dice < 0.70:
            for _ in range(rng.randrange(1, 12)):
                (node.put if rng.random() < 0.6 else node.drop)(rng.choice(KEYS))
        elif dice < 0.76:
            await node.restart()
        elif dice < 0.80:
            await world.fail_over(rng.choice([0.0, 0.5, 8.0]))
        elif dice < 0.86:
            world.network.partition({node.node_id}, {world.leader, "operator"})
        elif dice < 0.90:
            world.network.heal()
        elif dice < 0.94:
            world.bad_network()
        elif dice < 0.97:
            await attempt(world, rng.choice(names))
        else:
            keys = b"".join(rng.sample(KEYS, 5))
            await attempt(world, None, keys)
        await world.clock.sleep(rng.choice([0.0, 0.05, 0.3, 1.0, 4.0]))
    world.good_network()
    await world.clock.sleep(10.0)  # what is still on its way arrives now
    await world.converge()
    await world.stop()


async def attempt(world: World, node_id: str | None, keys: bytes = b"") -> None:
    """Start or cancel a drain, or trim and replicate; refusals and losses are part of the game."""
    try:
        if node_id is None:
            if world.rng.random() < 0.5:
                await world.call("TrimBlocks", master_pb2.TrimBlocksRequest(keys=keys, replica_count=1))
            await world.call("ReplicateBlocks", master_pb2.ReplicateBlocksRequest(keys=keys, replica_count=2))
        else:
            cancel, move = world.rng.random() < 0.6, world.rng.random() < 0.8
            request = master_pb2.DrainNodeRequest(node_id=node_id, cancel=cancel, move_blocks=move)
            await world.call("DrainNode", request)
    except errors.MooncacheError:
        pass


@pytest.mark.parametrize("seeds", BATCHES, ids=lambda seeds: f"{seeds.start}-{seeds.stop - 1}")
def test_the_directory_becomes_the_union_of_the_nodes(seeds: range) -> None:
    for seed in seeds:
        try:
            virtual_time.run(trouble(seed), seed=seed)
        except BaseException as error:
            error.add_note(f"reproduce with MOONCACHE_SIM_SEED={seed}")
            raise


@pytest.mark.parametrize("seed", range(1000, 1024))
def test_the_native_index_converges_too(seed: int) -> None:
    virtual_time.run(trouble(seed, lambda: _native.BlockIndex(hash_seed=seed)), seed=seed)


def run(scenario: object) -> None:
    virtual_time.run(scenario, seed=1)


def test_the_same_seed_gives_the_same_run() -> None:
    async def traced() -> tuple[object, ...]:
        world = World(77)
        for n in range(3):
            world.add_node(f"node-{n}").put(KEYS[n])
        world.bad_network()
        await world.clock.sleep(30.0)
        counts = tuple(sorted(world.network.counts.items()))
        epoch = world.master.state.membership.epoch
        await world.stop()
        return counts, epoch

    assert virtual_time.run(traced(), seed=77) == virtual_time.run(traced(), seed=77)


def test_a_new_empty_master_rebuilds_the_directory_of_64_nodes() -> None:
    async def scenario() -> None:
        world = World(64)
        for n in range(64):
            node = world.add_node(f"node-{n}")
            for key in world.rng.sample(KEYS, 20):
                node.put(key)
        await world.converge()
        before = world.truth()
        await world.fail_over()
        assert world.master.state.completeness() == 0.0
        await world.converge()
        assert world.listed() == before
        shown = (await world.call("GetClusterMap", master_pb2.GetClusterMapRequest())).map
        assert [node.index for node in shown.nodes] == list(range(64))
        assert shown.term == 2
        await world.stop()

    run(scenario())


def test_a_silent_node_leaves_the_directory_and_comes_back() -> None:
    async def scenario() -> None:
        world = World(3)
        world.add_node("a").put(KEYS[0])
        world.add_node("b").put(KEYS[1])
        await world.converge()
        world.network.partition({"a"}, {world.leader})
        await world.clock.sleep(4.5)
        assert states(world)["a"] == common_pb2.NODE_STATE_SUSPECT
        await world.clock.sleep(4.0)
        assert states(world)["a"] == common_pb2.NODE_STATE_DEAD
        assert {name for name, _ in world.listed()} == {"b"}
        world.network.heal()
        await world.converge()
        assert states(world)["a"] == common_pb2.NODE_STATE_ACTIVE
        await world.stop()

    run(scenario())


def test_a_jump_of_the_wall_clock_changes_nothing() -> None:
    """Leases, heartbeats and reports are timed by clocks that never jump."""

    async def scenario() -> None:
        world = World(3)
        world.add_node("a").put(KEYS[0])
        world.add_node("b").put(KEYS[1])
        await world.converge()
        await world.clock.sleep(30.0)  # slow start is over
        listed = world.listed()
        for jump_s in (10 * 86400.0, -20 * 86400.0):
            before = world.clock.wall_s()
            world.clock._wall_start_s += jump_s
            assert abs(world.clock.wall_s() - before) > 86400
            for _ in range(20):
                await world.clock.sleep(0.5)
                assert set(states(world).values()) == {common_pb2.NODE_STATE_ACTIVE}
                assert world.listed() == listed
        assert world.master.state.membership.term == 1
        await world.stop()

    run(scenario())


def states(world: World) -> dict[str, int]:
    return {node.node_id: node.state for node in world.master.state.cluster_map().nodes}


@pytest.mark.parametrize("faulty", [False, True])
def test_a_drain_moves_every_block_that_only_the_node_holds(faulty: bool) -> None:
    async def scenario() -> None:
        world = World(5)
        for n in range(4):
            world.add_node(f"node-{n}")
        for key in KEYS:
            world.nodes["node-0"].put(key)
        for key in KEYS[:7]:
            world.nodes["node-1"].put(key)
        await world.converge()
        request = master_pb2.DrainNodeRequest(node_id="node-0", move_blocks=True)
        task_id = (await world.call("DrainNode", request)).task_id
        if faulty:
            world.bad_network()
        for _ in range(120):
            await world.clock.sleep(0.5)
            world.good_network() if world.rng.random() < 0.05 else None
            task = world.master.state.tasks.require(task_id)
            if task.over:
                break
        world.good_network()
        if not faulty:
            assert task.state.value == "done"
        elsewhere = {key for name, key in world.truth() if name != "node-0"}
        assert task.state.value != "done" or elsewhere == set(KEYS)
        assert {key for _, key in world.truth()} == set(KEYS), "a drain loses nothing"
        await world.converge()
        await world.stop()

    run(scenario())


def test_replicas_pins_removal_and_usage() -> None:
    async def scenario() -> None:
        world = World(6)
        for n in range(3):
            world.add_node(f"node-{n}")
        for key in KEYS[:10]:
            world.nodes["node-0"].put(key)
        await world.converge()
        keys = b"".join(KEYS[:10])
        replicate = master_pb2.ReplicateBlocksRequest(keys=keys, replica_count=2)
        done = await world.call("ReplicateBlocks", replicate)
        await world.clock.sleep(5.0)
        task = (await world.call("GetTask", master_pb2.GetTaskRequest(task_id=done.task_id))).task
        assert (task.state, task.done_block_count) == (master_pb2.TASK_STATE_DONE, 10)
        await world.converge()
        assert len(world.truth()) == 20
        unknown = b"\xff" * 32
        pinned = await world.call("PinBlocks", master_pb2.PinBlocksRequest(keys=keys + unknown, ttl_ms=1000))
        assert list(pinned.codes) == [0] * 10 + [errors.NotFound.code]
        usage = await world.call("GetUsage", master_pb2.GetUsageRequest())
        assert [(row.tenant, row.used_bytes) for row in usage.tenants] == [("default", 20 * BLOCK_BYTES)]
        match = await world.call("Match", master_pb2.MatchRequest(keys=keys + unknown))
        assert match.leading_block_count == 10
        assert match.nodes[0].leading_block_count == 10
        gone = await world.call("RemoveBlocks", master_pb2.RemoveBlocksRequest(keys=keys))
        assert list(gone.codes) == [0] * 10
        await world.converge()
        assert not world.truth()
        await world.stop()

    run(scenario())


def test_tenants_see_their_own_only() -> None:
    async def scenario() -> None:
        world = World(7)
        world.add_node("a").put(KEYS[0])
        await world.converge()
        mine = Token("tenant-x", admin=False, key=derive_tenant_key(CLUSTER.key, "tenant-x")).text
        found = await world.call("Locate", master_pb2.LocateRequest(keys=KEYS[0]), token=mine)
        assert found.locations == b"\0\0"
        with pytest.raises(errors.PermissionDenied):
            await world.call("Locate", master_pb2.LocateRequest(keys=KEYS[0], tenant="default"), token=mine)
        with pytest.raises(errors.PermissionDenied):
            await world.call("DrainNode", master_pb2.DrainNodeRequest(node_id="a"), token=mine)
        replicate = master_pb2.ReplicateBlocksRequest(keys=KEYS[0], replica_count=1)
        task = await world.call("ReplicateBlocks", replicate)
        with pytest.raises(errors.TaskUnknown):
            await world.call("GetTask", master_pb2.GetTaskRequest(task_id=task.task_id), token=mine)
        assert not (await world.call("ListTasks", master_pb2.ListTasksRequest(), token=mine)).tasks
        with pytest.raises(errors.Unauthenticated):
            await world.call("Locate", master_pb2.LocateRequest(), token="mcc1." + "0" * 64)
        await world.stop()

    run(scenario())


def test_a_watch_ends_with_the_change_and_with_leadership() -> None:
    async def scenario() -> None:
        world = World(8)
        watch = master_pb2.WatchClusterMapRequest(wait_ms=5000)
        first = await world.call("WatchClusterMap", watch, timeout_s=10.0)
        assert first.changed
        watch.known_epoch, watch.known_term = first.map.epoch, first.map.term
        assert not (await world.call("WatchClusterMap", watch, timeout_s=10.0)).changed
        world.add_node("a")
        second = await world.call("WatchClusterMap", watch, timeout_s=10.0)
        assert [node.node_id for node in second.map.nodes] == ["a"]
        await world.converge()
        world.nodes["a"].put(KEYS[0])
        shown = world.master.state.cluster_map()
        watch.known_epoch = shown.epoch
        world.master.state.end_term()
        with pytest.raises(errors.NotLeader):
            await world.call("WatchClusterMap", watch, timeout_s=10.0)
        world.master.state.begin_term(2)
        await world.converge()
        await world.stop()

    run(scenario())
