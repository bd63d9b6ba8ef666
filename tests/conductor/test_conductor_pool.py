"""The conductor beside a real pool: hits at store nodes, blocks that leave, a pool that goes away."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

import mooncache
from mooncache.auth import SESSION_S, create_cluster_token, parse_session_token
from mooncache.client.host import host_id
from mooncache.client.results import NodeView, WatchState
from mooncache.cluster.embedded import ClusterSettings, EmbeddedCluster
from mooncache.conductor.shell.pool import TENANTS_KEPT, TenantStoreClients
from mooncache.proto.v1 import conductor_pb2 as pb
from mooncache.runtime.clock import ManualClock
from tests.conditions import until
from tests.conductor.support import BLOCK, Conductor, chain, config_at, instance, running

PREFILL, DECODE = pb.INSTANCE_ROLE_PREFILL, pb.INSTANCE_ROLE_DECODE


@pytest.fixture(autouse=True)
def patient_lookups(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a busy machine a question to the pool takes longer than a request would wait for it."""
    monkeypatch.setattr("mooncache.conductor.shell.pool.MATCH_TIMEOUT_S", 2)


@pytest.fixture
def pool(tmp_path: Path) -> Iterator[EmbeddedCluster]:
    settings = ClusterSettings(state_dir=tmp_path, nodes=2, capacity_bytes=64 << 20, port=0)
    with EmbeddedCluster(settings) as cluster:
        yield cluster


@asynccontextmanager
async def beside(cluster: EmbeddedCluster, **overrides: Any) -> AsyncIterator[Conductor]:
    settings = {
        "cluster.master_targets": cluster.master_target,
        "conductor.suspect_after_s": 60,
        "conductor.lease_s": 120,
        **overrides,
    }
    async with running(config_at(cluster.state_dir, **settings)) as conductor:
        await conductor.register(instance("p", PREFILL), instance("d", DECODE))
        yield conductor


def pool_nodes(cluster: EmbeddedCluster) -> tuple[NodeView, ...]:
    with mooncache.connect(**cluster.client_settings()) as client:
        return client.nodes()


def put(cluster: EmbeddedCluster, keys: bytes) -> None:
    with mooncache.connect(**cluster.client_settings()) as client:
        blocks = [keys[at : at + 32] for at in range(0, len(keys), 32)]
        client.put_many(blocks, [b"x" * 64] * len(blocks)).raise_for_errors()


def remove(cluster: EmbeddedCluster, keys: bytes) -> None:
    with mooncache.connect(**cluster.client_settings()) as client:
        client.remove_many([keys[at : at + 32] for at in range(0, len(keys), 32)])


async def connected(c: Conductor) -> None:
    async def ready() -> bool:
        return c.service.state.pool.connected

    await until(ready)


def test_what_the_pool_holds_is_fetched_and_what_left_it_is_named(pool: EmbeddedCluster) -> None:
    keys = chain("a", 200)

    async def scenario() -> None:
        async with beside(pool) as c:
            await connected(c)
            first = await c.schedule("r1", keys)
            await c.progress(first.decision_id, pb.REQUEST_PHASE_PREFILLED)
            await c.progress(first.decision_id, pb.REQUEST_PHASE_FINISHED)
            await asyncio.to_thread(put, pool, keys[: 32 * 150])
            plan = await c.schedule("r2", keys)
            assert plan.pool_hit_tokens == 150 * BLOCK
            assert f"branch=fetch;local=0;pool={150 * BLOCK};computed={50 * BLOCK + 5}" in plan.summary
            record = await c.record("r2")
            assert record["pool"]["state"] == "ok"
            assert record["chosen"]["fetched_tokens"] == 150 * BLOCK
            assert record["misses"][0] == {"from_token": 2400, "to_token": 3200, "reason": "evicted"}
            await asyncio.to_thread(remove, pool, keys[: 32 * 150])
            await c.progress(plan.decision_id, pb.REQUEST_PHASE_ABORTED)
            await c.schedule("r3", keys)
            assert (await c.record("r3"))["misses"][0] == {
                "from_token": 0,
                "to_token": 3200,
                "reason": "evicted",
            }

    asyncio.run(scenario())


def test_who_waits_at_the_plans_node_hears_that_the_blocks_will_not_come(pool: EmbeddedCluster) -> None:
    """A prefill leg fails; a leg of another request waits at the node that the plan named."""
    keys = chain("a", 200)

    async def scenario() -> None:
        async with beside(pool) as c:
            await c.register(
                instance("p", PREFILL, host_id=host_id()), instance("d", DECODE, host_id=host_id())
            )
            await connected(c)
            plan = await c.schedule("r", keys)
            names = {node.node_id for node in pool_nodes(pool)}
            assert plan.prefill.instance_id and plan.store_node in names
            with mooncache.connect(**pool.client_settings()) as client:
                watch = client.watch()
                watch.add("all", keys, timeout_s=60.0, node=plan.store_node)
                watch.add("elsewhere", keys, timeout_s=60.0, node=(names - {plan.store_node}).pop())
                await c.progress(plan.decision_id, pb.REQUEST_PHASE_PREFILL_FAILED)
                news = await asyncio.to_thread(watch.next, 30.0)
                assert [(each.name, each.state) for each in news] == [("all", WatchState.GIVEN_UP)]
                watch.close()
            given_up = b'mooncache_conductor_give_ups_total{outcome="ok",reason="failed"} 1.0'
            await until(lambda: given_up in c.service.metrics.render())

    asyncio.run(scenario())


def test_everything_cached_needs_no_prefill_leg(pool: EmbeddedCluster) -> None:
    keys = chain("a", 300)

    async def scenario() -> None:
        async with beside(pool) as c:
            await connected(c)
            await asyncio.to_thread(put, pool, keys)
            plan = await c.schedule("r", keys)
            assert plan.admitted
            assert not plan.prefill.instance_id
            assert "branch=inline-fetch" in plan.summary
            assert plan.decode.wait_tokens == 0

    asyncio.run(scenario())


@pytest.mark.timeout(120)
def test_a_pool_that_goes_away_costs_the_hits_only(pool: EmbeddedCluster) -> None:
    keys = chain("a", 100)

    async def scenario() -> None:
        async with beside(pool) as c:
            await connected(c)
            await asyncio.to_thread(put, pool, keys[: 32 * 50])
            first = await c.schedule("r1", keys)
            assert first.pool_hit_tokens == 50 * BLOCK
            await c.progress(first.decision_id, pb.REQUEST_PHASE_PREFILLED)
            await c.progress(first.decision_id, pb.REQUEST_PHASE_FINISHED)
            for name in list(pool.parts):
                await asyncio.to_thread(pool.kill, name)
            plan = await c.schedule("r2", keys)
            assert plan.admitted
            assert plan.pool_hit_tokens == 0
            record = await c.record("r2")
            assert record["pool"]["state"] in ("timeout", "absent")
            assert record["misses"][0]["reason"] == "pool_unreachable"

    asyncio.run(scenario())


def test_a_pool_that_comes_later_is_found(tmp_path: Path) -> None:
    settings = ClusterSettings(state_dir=tmp_path, nodes=1, capacity_bytes=64 << 20, port=0)
    cluster = EmbeddedCluster(settings)
    with cluster:
        for name in list(cluster.parts):
            cluster.kill(name)

        async def scenario() -> None:
            async with beside(cluster) as c:
                assert (await c.schedule("r1", chain("a", 50))).admitted
                for name in list(cluster.parts):
                    await asyncio.to_thread(cluster.restart, name)
                await connected(c)
                await asyncio.to_thread(put, cluster, chain("b", 10))
                assert (await c.schedule("r2", chain("b", 50))).pool_hit_tokens == 10 * BLOCK

        asyncio.run(scenario())


async def test_the_pool_is_asked_as_the_requests_tenant(tmp_path: Path) -> None:
    token, clock = create_cluster_token(tmp_path / "token"), ManualClock()
    made: list[tuple[str, int]] = []

    class Client:
        closed = 0

        def for_tenant(self, text: str) -> Client:
            session = parse_session_token(text)
            made.append((session.tenant, session.end_unix_s))
            return Client()

        async def close(self) -> None:
            Client.closed += 1

    parent, clients = Client(), TenantStoreClients(token.text)
    first = clients.client(parent, "team-a", clock.wall_s())  # type: ignore[arg-type]
    assert clients.client(parent, "team-a", clock.wall_s()) is first  # type: ignore[arg-type]
    assert clients.client(parent, "team-b", clock.wall_s()) is not first  # type: ignore[arg-type]
    later_s = clock.wall_s() + SESSION_S
    assert clients.client(parent, "team-a", later_s) is not first, "its token ends soon"  # type: ignore[arg-type]
    assert [name for name, _ in made] == ["team-a", "team-b", "team-a"]
    assert made[2][1] == made[0][1] + SESSION_S
    for number in range(TENANTS_KEPT + 5):
        clients.client(parent, f"t{number}", later_s)  # type: ignore[arg-type]
    assert len(clients._known) == TENANTS_KEPT
    await clients.close()
    assert Client.closed == TENANTS_KEPT
