"""Copies of blocks in a real pool: their holders share the reading, and a spare one goes when it is not read."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator

import pytest

import mooncache
from mooncache.auth import load_cluster_token
from mooncache.bench.handover.copies import AT_MOST, READERS, node_metrics, read_bytes
from mooncache.client.keys import to_block_key
from mooncache.cluster.embedded import EmbeddedCluster
from mooncache.conductor.shell.copies import Copies
from mooncache.config import load
from mooncache.runtime.clock import SystemClock
from tests.client.conftest import make_cluster
from tests.conditions import wait_until

BLOCK_BYTES = 64 << 10


@pytest.fixture(scope="module")
def three(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedCluster]:
    """Three nodes whose spare copies go after four seconds without a read."""
    running = make_cluster(tmp_path_factory.mktemp("copies"), nodes=3, MOONCACHE_STORE_NODE_SPARE_IDLE_S="4")
    running.start()
    yield running
    running.stop()


def holders(client: mooncache.Client, keys: list[str]) -> list[set[str]]:
    listed = list(client.list(limit=1_000_000))
    return [{entry.node_id for entry in listed if entry.key == to_block_key(key)} for key in keys]


@pytest.mark.parametrize("matches", [False, True])
def test_twelve_readers_share_three_copies(three: EmbeddedCluster, matches: bool) -> None:
    keys = [f"shared-{matches}-{number}" for number in range(48)]
    values = [os.urandom(BLOCK_BYTES) for _ in keys]
    with mooncache.connect(**three.client_settings(), timeout_s=30) as writer:
        writer.put_many(keys, values, replicas=3).raise_for_errors()
    nodes = node_metrics(three)
    before = [read_bytes(node) for node in nodes]
    for _ in range(READERS):
        targets = [bytearray(BLOCK_BYTES) for _ in keys]
        with mooncache.connect(**three.client_settings(), timeout_s=30, shm=False) as reader:
            if matches:
                assert reader.match(keys).leading_blocks == len(keys)
            assert reader.get_many_into(keys, targets).hits == len(keys)
        assert targets == values
    found = [read_bytes(node) - count for node, count in zip(nodes, before, strict=True)]
    assert sum(found) == READERS * len(keys) * BLOCK_BYTES
    assert max(found) * len(found) <= AT_MOST * sum(found), found


def test_a_spare_copy_goes_when_it_is_not_read_and_others_stay(three: EmbeddedCluster) -> None:
    keys = {name: f"spare-{name}" for name in ("idle", "read", "pinned", "plain")}
    packed = {name: to_block_key(key) for name, key in keys.items()}
    settings = {"cluster.state_dir": str(three.state_dir), "cluster.master_targets": three.master_target}
    config, token = load(env={}, overrides=settings), load_cluster_token(three.token_path).text

    async def order(packed: bytes, count: int) -> None:
        copies = Copies(config, token, SystemClock())
        try:
            await copies.order(packed, count)
        finally:
            await copies.close()

    with mooncache.connect(**three.client_settings(), timeout_s=30, shm=False) as client:
        for name, key in keys.items():
            client.put(key, b"x" * 512, replicas=2 if name == "plain" else 1)
        spare = b"".join(packed[name] for name in ("idle", "read", "pinned"))
        asyncio.run(order(spare, 3))
        wait_until(lambda: [len(where) for where in holders(client, list(keys.values()))] == [3, 3, 3, 2])
        client.pin_many([keys["pinned"]], ttl_s=600).raise_for_errors()

        def idle_is_gone() -> bool:
            for node in client.nodes():  # each copy is read now and then
                client._engine._native.get_bytes([packed["read"]], 10.0, None, node.index)
            return len(holders(client, [keys["idle"]])[0]) == 1

        wait_until(idle_is_gone)
        found = holders(client, [keys["read"], keys["pinned"], keys["plain"]])
        assert [len(where) for where in found] == [3, 3, 2]
        client.unpin_many([keys["pinned"]]).raise_for_errors()
        wait_until(lambda: [len(where) for where in holders(client, list(keys.values()))] == [1, 1, 1, 2])
        assert list(client.get_many(list(keys.values()))) == [b"x" * 512] * len(keys), "a block was lost"
