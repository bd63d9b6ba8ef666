"""Copies of a hot prefix: beside its readers, and of every part that the shards of an engine keep."""

from __future__ import annotations

import asyncio
import json
import math
import signal
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

import mooncache
from mooncache.client.keys import KEY_BYTES
from mooncache.cluster.embedded import ClusterSettings, EmbeddedCluster
from mooncache.conductor.background import replicate_prefixes
from mooncache.conductor.core import hot_prefixes
from mooncache.conductor.core.hot_prefixes import HOSTS_MAX, SHARDS_AGAIN_S, HotPrefixes, Speed
from mooncache.conductor.core.policy.replication import FADES_IN_S
from mooncache.errors import InvalidArgument
from mooncache.proto.v1 import conductor_pb2 as pb
from tests.conditions import until, wait_until
from tests.conductor.support import (
    BLOCK,
    CALM,
    DECODE,
    PASSPORT,
    PREFILL,
    chain,
    config_at,
    instance,
    running,
)

SLOW = Speed(tokens_per_s=5.0, bytes_per_token=1000, block_tokens=16)
RATE = 1e6


def _read(hot: HotPrefixes, keys: bytes, times: int, now_s: float, *hosts: str) -> int:
    return max(hot.use("m", keys, len(keys) // 32, 16, now_s, hosts) for _ in range(times))


def test_an_order_names_the_hosts_of_the_readers_the_busiest_first() -> None:
    hot, keys = HotPrefixes(RATE), chain("a", 1)
    _read(hot, keys, 40, 0.0, "b")
    _read(hot, keys, 80, 0.0, "a", "c")
    _read(hot, keys, 1, 0.0, "c")
    (order,) = hot.plan({"m": SLOW}, 4, 0.0)
    assert order.hosts == ("c", "a", "b")
    later_s = 8 * FADES_IN_S
    _read(hot, keys, 3, later_s, "d")
    (gone,) = hot.plan_removals({"m": replace(SLOW, tokens_per_s=1e6)}, later_s + 3 * FADES_IN_S)
    assert gone.hosts == (), "who does not read any more needs no copy"


def test_the_hosts_of_a_segment_are_bounded() -> None:
    hot, keys = HotPrefixes(RATE), chain("a", 1)
    for number in range(3 * HOSTS_MAX):
        _read(hot, keys, 1 + number, 0.0, f"h{number}")
    (order,) = hot.plan({"m": SLOW}, 4, 0.0)
    assert len(order.hosts) == HOSTS_MAX
    assert order.hosts[0] == f"h{3 * HOSTS_MAX - 1}"


def test_all_parts_of_a_block_are_copied_or_none() -> None:
    hot, keys, others = HotPrefixes(RATE), chain("a", 4), [chain("a1", 4), chain("a2", 4)]
    speeds = {"m": replace(SLOW, shards=3)}
    assert _read(hot, keys, 60, 0.0) == 0, "nothing is asked of a prefix that needs no copies"
    assert hot.plan(speeds, 4, 0.0) == [], "one part relieves no load"
    assert hot.use("m", keys, 4, 16, 0.0) == 4
    assert hot.use("m", keys, 4, 16, 0.0) == 0, "the answer is under way"
    assert hot.use("m", keys, 4, 16, SHARDS_AGAIN_S) == 4, "it was lost"
    hot.learn_shards(keys, others, SHARDS_AGAIN_S)
    hot.check()
    orders = hot.plan(speeds, 4, SHARDS_AGAIN_S)
    found = b"".join(order.keys for order in orders)
    for part in (keys, *others):
        assert all(part[at : at + 32] in found for at in range(0, len(part), 32))
    assert len(found) == 3 * len(keys)
    blocks = [len(order.keys) // 96 * (order.copies - order.before) for order in orders]
    assert [order.size_bytes for order in orders] == [16_000 * count for count in blocks]
    assert hot.use("m", keys, 4, 16, SHARDS_AGAIN_S) == 0, "they are known"
    removals = hot.plan_removals({"m": replace(speeds["m"], tokens_per_s=1e9)}, 20 * FADES_IN_S)
    assert sorted(order.keys for order in removals) == sorted(order.keys for order in orders)


def test_keys_of_shards_that_do_not_fit_are_refused() -> None:
    hot, keys = HotPrefixes(RATE), chain("a", 4)
    _read(hot, keys, 60, 0.0)
    hot.plan({"m": replace(SLOW, shards=3)}, 4, 0.0)
    for wrong in ([chain("b", 3), chain("c", 4)], [chain("b", 5), chain("c", 5)]):
        with pytest.raises(InvalidArgument):
            hot.learn_shards(keys, wrong, 0.0)
    hot.learn_shards(keys, [], 0.0)
    hot.learn_shards(chain("unknown", 2), [chain("b", 2)], 0.0)
    hot.learn_shards(keys, [chain("b", 2)[:32], chain("c", 2)[:32]], 0.0)  # fewer than asked for
    hot.check()
    assert [len(order.keys) for order in hot.plan({"m": replace(SLOW, shards=3)}, 4, 0.0)] == [3 * 32]


def test_keys_of_shards_count_as_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hot_prefixes, "KEY_BYTES_MAX", 32 * 40)
    hot = HotPrefixes(RATE)
    speeds = {"m": replace(SLOW, shards=2)}
    for number in range(8):
        keys = chain(f"p{number}", 4)
        _read(hot, keys, 60, 0.0)
        hot.plan(speeds, 4, 0.0)
        hot.learn_shards(keys, [chain(f"q{number}", 4)], 0.0)
        hot.check()


@pytest.fixture
def pool(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[EmbeddedCluster]:
    """Three nodes, as if each were on a host of its own: host-0, host-1, host-2."""
    monkeypatch.setattr("mooncache.conductor.shell.pool.MATCH_TIMEOUT_S", 2)  # a busy machine
    with EmbeddedCluster(
        ClusterSettings(state_dir=tmp_path, nodes=3, capacity_bytes=32 << 20, port=0)
    ) as cluster:
        for number, name in enumerate(sorted(name for name in cluster.parts if name.startswith("node"))):
            cluster.kill(name, signal.SIGTERM)
            part = cluster.parts[name]
            part.env = {**part.env, "MOONCACHE_STORE_NODE_HOST_ID": f"host-{number}"}
            cluster.restart(name)
        cluster.wait_ready(60.0)
        yield cluster


def _split(packed: bytes) -> list[bytes]:
    return [packed[at : at + 32] for at in range(0, len(packed), 32)]


def test_a_hot_prefix_of_a_tensor_parallel_engine_is_copied_to_its_readers_host(
    pool: EmbeddedCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys, other = chain("hot", 8), chain("hot of the other rank", 8)
    slow = {"m": replace(SLOW, shards=2)}
    monkeypatch.setattr(replicate_prefixes, "speeds", lambda _state: slow)
    passport = json.dumps({**json.loads(PASSPORT), "tp_size": 2})
    host_of: dict[str, str] = {}

    def places(client: mooncache.Client) -> dict[bytes, set[str]]:
        found: dict[bytes, set[str]] = {}
        for entry in client.list():
            found.setdefault(entry.key, set()).add(host_of[entry.node_id])
        return found

    async def scenario(client: mooncache.Client) -> None:
        settings = {**CALM, "cluster.master_targets": pool.master_target}
        async with running(config_at(pool.state_dir, **settings)) as c:
            await c.register(
                instance("p", PREFILL, host_id="host-0", passport_json=passport),
                instance("d", DECODE, host_id="host-2", passport_json=passport),
            )

            async def connected() -> bool:
                return c.service.state.pool.node_count == 3

            await until(connected)
            count = 0

            async def copied() -> bool:
                nonlocal count
                count += 1
                plan = await c.schedule(f"r{count}", keys)
                shard_keys = other[: plan.shard_blocks * 32]
                await c.progress(plan.decision_id, pb.REQUEST_PHASE_FIRST_TOKEN, shard_keys=shard_keys)
                await c.progress(plan.decision_id, pb.REQUEST_PHASE_FINISHED)
                found = await asyncio.to_thread(places, client)
                return all("host-2" in found[key] and len(found[key]) > 1 for key in _split(keys + other))

            await until(copied)

    with mooncache.connect(**pool.client_settings()) as client:
        hosts = ["host-0", "host-1", "host-2"]
        wait_until(
            lambda: sorted(node.host_id for node in client.nodes()) == hosts, "the new names of the hosts"
        )
        host_of.update({node.node_id: node.host_id for node in client.nodes()})
        writer = next(node.index for node in client.nodes() if node.host_id == "host-1")
        client._engine.put_many(
            _split(keys + other), [b"x" * 64] * 16, 1, None, node=writer
        ).raise_for_errors()
        asyncio.run(scenario(client))


def test_operators_see_prefixes_as_a_tree() -> None:
    hot, now_s = HotPrefixes(RATE), 100.0
    assert hot.counts and not HotPrefixes(0).counts
    first, second = chain("a", 4), chain("b", 4, parent="a", shared=2)
    for keys, times in ((first, 3), (second, 1)):
        for _ in range(times):
            hot.use("m", keys, 4, BLOCK, now_s, ("h",), "alice")
    found = {(each.begin, each.blocks, round(each.reads)): each for each in hot.hottest(10, now_s)}
    assert set(found) == {(0, 1, 4), (1, 1, 4), (2, 2, 3), (2, 2, 1)}
    root, shared = found[0, 1, 4], found[1, 1, 4]
    assert (root.parent, shared.parent) == (0, root.name)
    assert found[2, 2, 3].parent == found[2, 2, 1].parent == shared.name
    assert (root.model, root.pool_tenant, root.tokens, root.copies) == ("m", "alice", BLOCK, 1)
    assert root.hosts == ("h",)
    hottest = hot.hottest(1, now_s)
    assert [(each.begin, each.blocks) for each in hottest] == [(2, 2)], "most tokens are read of it"
    view_and_keys = hot.find(hottest[0].name, now_s)
    assert view_and_keys == (hottest[0], first[2 * KEY_BYTES :])
    assert hot.find(1, now_s) is None
    assert hot.hottest(1, now_s + 120.0)[0].reads == pytest.approx(3 / math.e)
