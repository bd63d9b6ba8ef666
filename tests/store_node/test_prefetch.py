"""Blocks that lie on a disk alone come up before anybody asks for them: named by a match, brought up by one call, and
then served from memory. What finds no room is given up and read from the disk as before."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Iterator
from dataclasses import replace
from functools import partial

import pytest

import mooncache
from mooncache.cluster.embedded import ClusterSettings, EmbeddedCluster
from mooncache.conductor.core.decisions import PoolState
from mooncache.conductor.core.placed import PlacedRun
from mooncache.conductor.shell.pool import PoolLookup
from mooncache.errors import InvalidArgument, MooncacheError
from mooncache.kvcache.lookup import LookupRequest, Lookups
from mooncache.kvcache.pool_link import PoolLink
from mooncache.runtime.clock import SystemClock
from tests.conditions import wait_until
from tests.conductor.support import config_at
from tests.store_node.test_ssd_tier import BLOCK, MIB, follows, ssd, tier_of, value_of

WAIT_S = 60.0


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedCluster]:
    settings = ClusterSettings(
        state_dir=tmp_path_factory.mktemp("ssd"),
        nodes=1,
        capacity_bytes=16 * MIB,
        ssd_bytes=256 * MIB,
        port=0,
    )
    with EmbeddedCluster(replace(settings, extra_env=(("MOONCACHE_METRICS_ENABLED", "true"),))) as running:
        yield running


@pytest.fixture
def client(cluster: EmbeddedCluster) -> Iterator[mooncache.Client]:
    with mooncache.connect(**cluster.client_settings()) as connected:
        yield connected


def key_of(number: int) -> bytes:
    return hashlib.sha256(f"{number}".encode()).digest()


def cold_keys(cluster: EmbeddedCluster, client: mooncache.Client, count: int) -> list[bytes]:
    """Keys of blocks that are on the disk alone."""
    for number in range(120):  # 30 MiB through 16
        client.put(key_of(number), value_of(number))
        if number % 4 == 3 and number > 64:  # a put never waits for a disk: it gets the time to follow
            wait_until(partial(follows, cluster, number - 60), "the disk follows", every_s=0.01)
    below = [key for key in map(key_of, range(120)) if tier_of(client, key) == "ssd"]
    assert len(below) >= count
    return below[:count]


def check_all(client: mooncache.Client, keys: list[bytes]) -> None:
    """Each block is there and has its own bytes."""
    numbers = {key_of(number): number for number in range(120)}
    assert [client.get(key) for key in keys] == [value_of(numbers[key]) for key in keys]


def fill_with_pinned(client: mooncache.Client) -> list[bytes]:
    """Pin what is in memory, and new blocks until none fits."""
    pinned = [entry.key for entry in client.list() if entry.tier == "dram"]
    client.pin_many(pinned, ttl_s=600.0)
    for number in range(1000, 1100):
        try:
            client.put(key_of(number), value_of(number), timeout_s=1.0)
        except MooncacheError:
            return pinned
        client.pin(key_of(number), ttl_s=600.0)
        pinned.append(key_of(number))
    raise AssertionError("memory is never full")


def test_a_get_after_a_prefetch_is_served_from_memory(
    cluster: EmbeddedCluster, client: mooncache.Client
) -> None:
    keys = cold_keys(cluster, client, 4)
    found = client.match(b"".join(keys), touch=False)
    assert found.leading_blocks == 4
    assert [[(copy.node_id, copy.tier) for copy in each] for each in found.copies] == [
        [("node-1", "ssd")]
    ] * 4

    before = ssd(cluster, "prefetched_blocks")
    begun = client.prefetch(b"".join(keys), begin_s=WAIT_S)
    assert begun == (4, 4 * BLOCK)
    wait_until(lambda: ssd(cluster, "prefetched_blocks") == before + 4, "they have come up")
    copies = client.match(b"".join(keys), touch=False).copies
    assert [each[0].tier for each in copies] == ["dram"] * 4
    reads = ssd(cluster, "reads")
    check_all(client, keys)
    assert ssd(cluster, "reads") == reads, "the disk was not asked again"
    assert client.prefetch(b"".join(keys)) == (0, 0), "they are in memory"


def test_what_finds_no_room_is_given_up_and_still_read_from_the_disk(
    cluster: EmbeddedCluster, client: mooncache.Client
) -> None:
    keys = cold_keys(cluster, client, 16)
    given_up = ssd(cluster, "prefetch_given_up")
    begun = client.prefetch(b"".join(keys), max_bytes=2 * BLOCK, begin_s=WAIT_S)
    assert begun == (2, 2 * BLOCK), "no more than was asked for"
    assert ssd(cluster, "prefetch_given_up") > given_up

    pinned = fill_with_pinned(client)
    try:
        given_up = ssd(cluster, "prefetch_given_up")
        left = [key for key in keys if tier_of(client, key) == "ssd"][:1]
        assert client.prefetch(left, begin_s=WAIT_S).blocks == 1
        wait_until(lambda: ssd(cluster, "prefetch_given_up") == given_up + 1, "there is no room")
        assert tier_of(client, left[0]) == "ssd"
    finally:
        client.unpin_many(pinned)
    check_all(client, keys)


def test_what_is_asked_for_is_checked(client: mooncache.Client) -> None:
    for wrong in ({"max_bytes": 0}, {"max_bytes": 1.5}, {"begin_s": 0.0}, {"begin_s": "soon"}):
        with pytest.raises(InvalidArgument):
            client.prefetch([bytes(32)], **wrong)  # type: ignore[arg-type]
    assert client.prefetch([bytes(32)]) == (0, 0), "what is nowhere is no error"


def test_the_engines_side_and_the_conductor_hear_of_the_disk(
    cluster: EmbeddedCluster, client: mooncache.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mooncache.conductor.shell.pool.MATCH_TIMEOUT_S", 10)  # a busy machine
    keys = b"".join(cold_keys(cluster, client, 3))
    link = PoolLink(lambda: mooncache.connect(**cluster.client_settings()))
    assert link.connected.wait(WAIT_S)
    lookups = Lookups(link)
    try:
        lookups.ask(LookupRequest("r", keys, with_places=True))
        wait_until(lambda: lookups.pending == 0, "the pool answers")
        answer = lookups.take("r")
        assert answer is not None and answer.places == ("node-1 (ssd)",) * 3
    finally:
        lookups.close()
        link.close()
    asyncio.run(as_conductor(cluster, keys))


async def as_conductor(cluster: EmbeddedCluster, keys: bytes) -> None:
    config = config_at(cluster.state_dir, **{"cluster.master_targets": cluster.master_target})
    lookup = PoolLookup(config, cluster.token_path.read_text().strip(), SystemClock())
    try:
        assert await lookup.connect()
        found = await lookup.match(keys)
        assert (found.state, found.blocks) == (PoolState.OK, 3)
        assert found.runs == (PlacedRun(3, True, frozenset()),)
        assert await lookup.prefetch(keys, WAIT_S) == 3
    finally:
        await lookup.close()
