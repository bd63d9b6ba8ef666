"""Memory that the client lends for gets, and memory of the caller that it may use in place."""

from __future__ import annotations

import gc
import mmap
import os
from typing import Any

import numpy as np
import pytest

import mooncache
from mooncache.cluster.embedded import EmbeddedCluster
from mooncache.errors import Closed, InvalidArgument

BLOCK_BYTES = 300_000


def listed(client: mooncache.Client) -> int:
    """Buffers that are registered now; slabs of the receive pool are, too."""
    return client.stats()["registered_buffers"]


@pytest.fixture
def blocks(pool: mooncache.Client, request: pytest.FixtureRequest) -> dict[str, bytes]:
    made = {f"{request.node.name}-{i}": os.urandom(BLOCK_BYTES + i) for i in range(6)}
    pool.put_many(list(made), list(made.values())).raise_for_errors()
    return made


def test_views_show_the_block_and_give_their_memory_back(
    pool: mooncache.Client, blocks: dict[str, bytes]
) -> None:
    for _ in range(3):
        got = pool.get_many_views([*blocks, "missing"])
        assert [bytes(view) for view in got.values[:-1] if view is not None] == list(blocks.values())
        assert got.values[-1] is None
        assert got.hits == len(blocks)
        assert all(view is not None and view.readonly for view in got.values[:-1])
        assert pool.stats()["receive_pool_lent_bytes"] >= sum(map(len, blocks.values()))
    array = np.frombuffer(pool.get_view(next(iter(blocks))) or b"", dtype=np.uint8)[1000:2000]
    del got
    gc.collect()
    assert pool.stats()["receive_pool_lent_bytes"] >= BLOCK_BYTES, "what is made of a view keeps the memory"
    assert array.tobytes() == next(iter(blocks.values()))[1000:2000]
    mapped = pool.stats()["receive_pool_mapped_bytes"]
    del array
    gc.collect()
    assert pool.stats()["receive_pool_lent_bytes"] == 0
    assert bytes(pool.get_view(next(iter(blocks))) or b"") == next(iter(blocks.values()))
    assert pool.stats()["receive_pool_mapped_bytes"] == mapped, "memory is used again"
    assert pool.get_view("missing") is None


def test_large_values_come_over_shared_memory_also_without_a_destination(
    cluster: EmbeddedCluster, blocks: dict[str, bytes]
) -> None:
    with mooncache.connect(**cluster.client_settings()) as client:
        for _ in range(2):
            assert list(client.get_many(blocks).values) == list(blocks.values())
        moved = client.stats()
        assert moved["shm_bytes"] == 2 * sum(map(len, blocks.values())), "the first time, too"
        assert moved["unix_bytes"] < BLOCK_BYTES
        small = {f"small-{i}": os.urandom(100) for i in range(40)}
        client.put_many(list(small), list(small.values())).raise_for_errors()
        assert list(client.get_many(small).values) == list(small.values())
        mixed = {**blocks, **small}
        for _ in range(3):
            assert list(client.get_many(mixed).values) == list(mixed.values())
            assert list(client.get_many(small).values) == list(small.values())


def test_views_outlive_the_client(cluster: EmbeddedCluster, blocks: dict[str, bytes]) -> None:
    with mooncache.connect(**cluster.client_settings()) as client:
        views = client.get_many_views(blocks).values
    del client
    gc.collect()
    assert [bytes(view) for view in views if view is not None] == list(blocks.values())


@pytest.mark.parametrize("pool_bytes", ["0", "1MiB"])
def test_with_nothing_left_to_lend_values_have_memory_of_their_own(
    cluster: EmbeddedCluster, blocks: dict[str, bytes], monkeypatch: pytest.MonkeyPatch, pool_bytes: str
) -> None:
    monkeypatch.setenv("MOONCACHE_CLIENT_RECEIVE_POOL_BYTES", pool_bytes)
    with mooncache.connect(**cluster.client_settings()) as client:
        views = client.get_many_views(blocks).values
        assert [bytes(view) for view in views if view is not None] == list(blocks.values())
        assert client.stats()["receive_pool_misses"] > 0
        assert client.stats()["receive_pool_mapped_bytes"] <= 1 << 20


def test_a_registered_buffer_cannot_go_away(pool: mooncache.Client, blocks: dict[str, bytes]) -> None:
    arena, before = bytearray(4 << 20), listed(pool)
    key, value = next(iter(blocks.items()))
    with pool.register_buffer(arena) as registered:
        assert registered.size_bytes == len(arena)
        assert listed(pool) == before + 1
        with pytest.raises(BufferError):
            arena.extend(b"more")
        assert pool.get_into(key, memoryview(arena)[100 : 100 + len(value)]) == len(value)
        assert arena[100 : 100 + len(value)] == value
        pool.put("from-registered", memoryview(arena)[100:5100])
    assert listed(pool) == before
    registered.close()
    arena.extend(b"more")
    assert pool.get("from-registered") == value[:5000]
    forgotten = pool.register_buffer(arena)
    del forgotten
    gc.collect()
    assert listed(pool) == before, "nobody can close it any more"
    mapped = mmap.mmap(-1, 1 << 20)
    with pool.register_buffer(mapped), pytest.raises(BufferError):
        mapped.close()
    mapped.close()


def test_the_same_buffer_twice_and_overlaps(pool: mooncache.Client) -> None:
    arena, before = np.zeros(1 << 20, dtype=np.uint8), listed(pool)
    first, second = pool.register_buffer(arena), pool.register_buffer(arena)
    with pytest.raises(InvalidArgument, match="overlaps"):
        pool.register_buffer(arena[10:20])
    first.close()
    assert listed(pool) == before + 1
    second.close()
    with pool.register_buffer(arena[10:20]):
        assert listed(pool) == before + 1


@pytest.mark.parametrize(
    ("buffer", "words"),
    [
        (b"read-only", "read-only"),
        (bytearray(), "at least one byte"),
        ([bytearray(10)], "One buffer"),
        ("text", "One buffer"),
        (7, "buffer protocol"),
        (np.zeros((10, 10), dtype=np.uint8)[:, 3], "not contiguous"),
    ],
)
def test_what_cannot_be_registered(pool: mooncache.Client, buffer: Any, words: str) -> None:
    before = listed(pool)
    with pytest.raises(InvalidArgument, match=words):
        pool.register_buffer(buffer)
    assert listed(pool) == before


def test_registering_and_closing_clients(cluster: EmbeddedCluster) -> None:
    arena = bytearray(1 << 20)
    with mooncache.connect(**cluster.client_settings()) as client:
        registered = client.register_buffer(arena)
    with pytest.raises(Closed):
        client.register_buffer(arena)
    registered.close()
    arena.clear()


async def test_the_asyncio_client_lends_and_registers_too(
    cluster: EmbeddedCluster, blocks: dict[str, bytes]
) -> None:
    arena = bytearray(1 << 20)
    async with await mooncache.connect_async(**cluster.client_settings()) as client:
        with client.register_buffer(arena):
            view = await client.get_view(next(iter(blocks)))
            assert view is not None
            assert bytes(view) == next(iter(blocks.values()))
            assert (await client.get_many_views(blocks)).hits == len(blocks)
