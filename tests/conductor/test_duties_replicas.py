"""Prefixes that many read get more copies in a real pool, within a budget, and lose them again; cold ones get none."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import mooncache
from mooncache.cluster.embedded import ClusterSettings, EmbeddedCluster
from mooncache.conductor.background import replicate_prefixes
from mooncache.conductor.core.hot_prefixes import ASK_AGAIN_S, BUDGET_S, HotPrefixes, Speed
from mooncache.conductor.core.policy.replication import FADES_IN_S, PrefixDemand
from mooncache.proto.v1 import conductor_pb2 as pb
from tests.conditions import until
from tests.conductor.support import BLOCK, CALM, DECODE, PREFILL, chain, config_at, instance, running

SLOW = {"m": Speed(tokens_per_s=100.0, bytes_per_token=1000, block_tokens=16)}
RATE = 1e6


def test_a_shared_beginning_is_counted_once_for_all_who_share_it() -> None:
    hot = HotPrefixes(RATE)
    for number in range(60):
        hot.use("m", chain(f"own{number}", 24, parent="system", shared=16), 24, 16, 10.0 + number)
    orders = hot.plan(SLOW, 8, 70.0)
    hot.check()
    shared = chain("system", 16)
    assert orders, "hot and nobody copies it"
    for order in orders:
        assert order.keys in shared, "a tail that only one prompt has was copied"
        assert 2 <= order.copies <= 4, "more than half of the nodes"
    assert hot.plan(SLOW, 8, 70.1) == [], "an order was repeated at once"
    assert hot.copied == len(orders)


def test_what_is_cold_or_cannot_be_copied_is_left_alone() -> None:
    hot = HotPrefixes(RATE)
    hot.use("m", chain("a", 8), 8, 16, 0.0)
    assert hot.plan(SLOW, 8, 1.0) == [], "one use is no demand"
    for _ in range(50):
        hot.use("m", chain("a", 8), 8, 16, 1.0)
    assert hot.plan(SLOW, 1, 1.0) == [], "a single node cannot hold two copies"
    assert hot.plan({}, 8, 1.0) == [], "of unknown size"
    assert hot.plan(SLOW, 8, 1.0 + 20 * FADES_IN_S) == [], "nobody asks for it any more"
    off = HotPrefixes(0.0)
    off.use("m", chain("a", 8), 8, 16, 0.0)
    assert len(off) == 0


def test_an_order_is_repeated_when_its_copies_may_be_gone_or_it_failed() -> None:
    hot = HotPrefixes(RATE)
    now_s = 0.0

    def read() -> None:
        for _ in range(200):
            hot.use("m", chain("a", 4), 4, 16, now_s)

    read()
    first = hot.plan(SLOW, 4, now_s)
    assert first
    hot.failed(first[0])
    assert [order.name for order in hot.plan(SLOW, 4, now_s + 1.0)] == [first[0].name]
    now_s += ASK_AGAIN_S + 2.0
    read()
    assert {order.name for order in hot.plan(SLOW, 4, now_s)} == {order.name for order in first}


def _hot_prefix(copies: int) -> tuple[HotPrefixes, float]:
    """A prefix that has `copies` copies by the demand at 0.0; a moment at which its demand has fallen below half."""
    hot = HotPrefixes(RATE)
    for _ in range(240):
        hot.use("m", chain("a", 1), 1, 16, 0.0)
    (order,) = hot.plan(SLOW, 2 * copies, 0.0)
    assert order.copies == copies
    assert (order.before, hot.copied) == (1, 1)
    return hot, FADES_IN_S * 2


def test_copies_go_when_half_of_the_demand_is_gone_and_not_before() -> None:
    hot, later_s = _hot_prefix(2)
    assert hot.plan_removals(SLOW, 1.0) == []
    assert hot.plan_removals(SLOW, later_s) == [], "one copy is still worth having, and that is half of two"
    assert hot.plan_removals({}, later_s) == [], "its model is away for a moment"
    (gone,) = hot.plan_removals(SLOW, FADES_IN_S * 8)
    assert (gone.copies, gone.before, gone.keys) == (1, 2, chain("a", 1))
    assert hot.copied == 0
    assert hot.plan_removals(SLOW, FADES_IN_S * 8) == [], "an order was repeated at once"
    hot.failed(gone)
    assert hot.plan_removals(SLOW, FADES_IN_S * 8 + 1) == [gone], "a failed order is planned again"
    hot.check()


def test_what_is_read_again_is_copied_again() -> None:
    hot, _ = _hot_prefix(2)
    later_s = FADES_IN_S * 8
    assert hot.plan_removals(SLOW, later_s)
    for _ in range(240):
        hot.use("m", chain("a", 1), 1, 16, later_s)
    assert [order.copies for order in hot.plan(SLOW, 4, later_s)] == [2]
    assert hot.plan_removals(SLOW, later_s) == []


@given(
    st.lists(st.tuples(st.integers(0, 3), st.integers(0, 60), st.floats(0.0, 200.0)), max_size=40),
    st.integers(2, 40),
)
def test_copies_neither_flap_nor_fall_below_one(uses: list[tuple[int, int, float]], nodes: int) -> None:
    hot, now_s = HotPrefixes(1e9), 0.0
    there: dict[int, int] = {}
    for which, count, pause_s in uses:
        now_s += pause_s
        for _ in range(count):
            hot.use("m", chain(f"c{which}", 2), 2, 16, now_s)
        for order in hot.plan(SLOW, nodes, now_s):
            assert order.copies <= nodes
            there[order.name] = order.copies
        for order in hot.plan_removals(SLOW, now_s):
            assert 1 <= order.copies < there[order.name] == order.before
            there[order.name] = order.copies
        assert hot.plan(SLOW, nodes, now_s) == [], "a copy that was just given back is wanted again"
        assert hot.copied == sum(copies > 1 for copies in there.values())
        hot.check()


@given(
    st.lists(st.tuples(st.integers(0, 5), st.integers(1, 40), st.floats(0.0, 5.0)), max_size=60),
    st.floats(1e3, 1e7),
)
def test_copies_stay_within_the_budget(uses: list[tuple[int, int, float]], rate: float) -> None:
    hot, now_s, moved = HotPrefixes(rate), 0.0, 0
    for which, blocks, pause_s in uses:
        now_s += pause_s
        hot.use("m", chain(f"c{which}", 40), blocks, 16, now_s)
        moved += sum(order.size_bytes for order in hot.plan(SLOW, 6, now_s))
        hot.check()
        assert moved <= rate * (BUDGET_S + now_s) * (1 + 1e-9)


@pytest.fixture
def pool(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[EmbeddedCluster]:
    monkeypatch.setattr("mooncache.conductor.shell.pool.MATCH_TIMEOUT_S", 2)  # a busy machine
    with EmbeddedCluster(
        ClusterSettings(state_dir=tmp_path, nodes=3, capacity_bytes=32 << 20, port=0)
    ) as cluster:
        yield cluster


def test_a_hot_prefix_gets_a_second_replica_in_a_real_pool_and_loses_it_again(
    pool: EmbeddedCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys, cold = chain("hot", 8), chain("cold", 8)
    slow = {"m": Speed(tokens_per_s=5.0, bytes_per_token=1000, block_tokens=16)}
    monkeypatch.setattr(replicate_prefixes, "speeds", lambda _state: slow)

    def split(packed: bytes) -> list[bytes]:
        return [packed[at : at + 32] for at in range(0, len(packed), 32)]

    def copies(client: mooncache.Client) -> Counter[bytes]:
        return Counter(entry.key for entry in client.list())

    async def scenario(client: mooncache.Client) -> None:
        settings = {**CALM, "cluster.master_targets": pool.master_target}
        async with running(config_at(pool.state_dir, **settings)) as c:
            await c.register(instance("p", PREFILL), instance("d", DECODE))

            async def connected() -> bool:
                return c.service.state.pool.node_count == 3

            await until(connected)
            for number in range(40):
                plan = await c.schedule(f"r{number}", keys)
                assert plan.pool_hit_tokens == 8 * BLOCK
                await c.progress(plan.decision_id, pb.REQUEST_PHASE_FINISHED)
            await c.schedule("once", cold)

            async def copied() -> bool:
                found = await asyncio.to_thread(copies, client)
                return min(found[key] for key in split(keys)) >= 2

            await until(copied)
            found = await asyncio.to_thread(copies, client)
            assert [found[key] for key in split(cold)] == [1] * 8, "a cold prefix was copied"
            state = c.service.state
            assert state.hot.copied > 0

            # Nobody reads it any more: the demand of the past hour is gone in one step.
            monkeypatch.setattr(state.hot, "_demand", PrefixDemand())

            async def trimmed() -> bool:
                found = await asyncio.to_thread(copies, client)
                return [found[key] for key in split(keys)] == [1] * 8

            await until(trimmed)
            await until(lambda: state.hot.copied == 0)
            # Of an order whose answer was late on a busy machine the conductor does not know what it dropped.
            samples = [
                sample for metric in state.instruments.copy_orders.collect() for sample in metric.samples
            ]
            outcomes = {sample.labels["outcome"] for sample in samples if sample.labels["kind"] == "trim"}
            assert outcomes != {"ok"} or state.instruments.trimmed_blocks._value.get() > 0
            values = await asyncio.to_thread(client.get_many, split(keys))
            assert list(values) == [b"x" * 64] * 8, "a block was lost with its copies"

    with mooncache.connect(**pool.client_settings()) as client:
        for packed in (keys, cold):
            client.put_many(split(packed), [b"x" * 64] * 8).raise_for_errors()
        asyncio.run(scenario(client))
