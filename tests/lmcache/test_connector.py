"""Chunks of a worker go to a real node through LMCache's own remote backend, and come back in another worker."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import Any

from tests.conditions import wait_until
from tests.lmcache.package import need_lmcache

need_lmcache()

from tests.kvcache.faulty import FaultyPool  # noqa: E402
from tests.lmcache.workers import content  # noqa: E402

Make = Callable[..., Any]


def test_chunks_come_back_in_another_engine(worker: Make) -> None:
    writer, reader = worker(), worker()
    keys, chunks = writer.keys(1, 2, 3), writer.chunks(1, 2, 3)
    assert reader.remote.batched_contains(keys) == 0
    assert reader.load(keys) == [None] * 3
    writer.store(keys, chunks)
    assert reader.remote.batched_contains(keys) == 3
    assert reader.load([keys[2], keys[0]]) == [content(chunks[2]), content(chunks[0])]


def test_the_prefix_ends_at_the_first_chunk_that_is_missing(worker: Make) -> None:
    one = worker()
    keys, chunks = one.keys(11, 12, 13, 14), one.chunks(11, 12, 14)
    one.store([keys[0], keys[1], keys[3]], chunks)
    assert one.remote.batched_contains(keys) == 2
    assert [one.remote.contains(key) for key in keys] == [True, True, False, True]
    assert [one.connector.exists_sync(key) for key in keys] == [True, True, False, True]
    assert [found is not None for found in one.load(keys)] == [True, True, False, True]
    ask = one.remote.batched_async_contains("lookup", keys)
    assert asyncio.run_coroutine_threadsafe(ask, one.loop).result(30) == 2
    leading = asyncio.run_coroutine_threadsafe(one.remote.batched_get_non_blocking("x", keys), one.loop)
    assert [content(chunk) for chunk in leading.result(30)] == [content(chunk) for chunk in chunks[:2]]


def test_single_calls(worker: Make) -> None:
    one = worker()
    (key,), (chunk,) = one.keys(21), one.chunks(21)
    one.remote.submit_put_task(key, chunk).result(30)
    found = one.remote.get_blocking(key)
    assert content(found) == content(chunk)
    assert found.metadata.shape == chunk.metadata.shape


def test_the_scheduler_asks_with_the_names_of_its_workers(worker: Make) -> None:
    writer, scheduler = worker(), worker(role="scheduler")
    keys = writer.keys(31, 32)
    writer.store(keys, writer.chunks(31, 32))
    assert scheduler.remote.batched_contains(keys) == 2


def test_a_chunk_that_is_not_full(worker: Make) -> None:
    one = worker(save_unfull_chunk=True)
    (key,), (chunk,) = one.keys(41), one.chunks(41)
    size = chunk.get_size() // 4
    chunk.set_used_size(size)
    one.store([key], [chunk])
    found = one.remote.get_blocking(key)
    assert found.get_size() == size
    assert found.metadata.shape[2] == one.metadata.chunk_size // 4
    assert content(found) == content(chunk)
    assert worker().load([key]) == [None], "an engine that has none of those takes none"


def test_all_memory_is_given_back(worker: Make) -> None:
    one = worker()
    free_bytes = one.free_bytes()
    keys, chunks = one.keys(51, 52), one.chunks(51, 52)
    one.store(keys, chunks)
    for chunk in chunks:
        chunk.ref_count_down()
    assert one.load([*keys, *one.keys(53)])[2] is None
    assert one.free_bytes() == free_bytes


def test_without_memory_for_all_chunks_the_first_ones_come(worker: Make) -> None:
    one = worker()
    keys, chunks = one.keys(61, 62), one.chunks(61, 62)
    one.store(keys, chunks)
    kept = []
    while (
        taken := one.cpu.allocate(one.metadata.get_shapes(), one.metadata.get_dtypes(), busy_loop=False)
    ) is not None:
        kept.append(taken)
    kept.pop().ref_count_down()
    assert one.load(keys) == [content(chunks[0]), None]


def test_memory_is_held_while_a_call_uses_it(worker: Make, faulty: FaultyPool) -> None:
    """LMCache gives up waiting; the call, which goes on, has its memory until it ends."""
    one = worker()
    faulty.gate = threading.Event()
    (key,), (chunk,) = one.keys(71), one.chunks(71)
    saving = one.remote.submit_put_task(key, chunk)
    wait_until(faulty.entered.is_set, "the put is at the pool")
    saving.cancel()
    chunk.ref_count_down()
    assert chunk.get_ref_count() >= 1
    expected = content(chunk)
    faulty.gate.set()
    wait_until(lambda: chunk.get_ref_count() == 0, "the call has ended")
    assert list(faulty.blocks.values()) == [expected]


def test_what_comes_when_nobody_waits_is_given_back(worker: Make, faulty: FaultyPool) -> None:
    one = worker()
    keys, chunks = one.keys(81), one.chunks(81)
    one.store(keys, chunks)
    free_bytes = one.free_bytes()
    faulty.gate = threading.Event()
    faulty.entered.clear()
    loading = asyncio.run_coroutine_threadsafe(one.remote.connection.batched_get(keys), one.loop)
    wait_until(faulty.entered.is_set, "the get is at the pool")
    assert one.free_bytes() < free_bytes
    loading.cancel()
    faulty.gate.set()
    wait_until(lambda: one.free_bytes() == free_bytes, "the memory is free again")


def test_names_are_blocks_of_the_pool(worker: Make, faulty: FaultyPool) -> None:
    one = worker()
    keys, chunks = one.keys(91), one.chunks(91)
    one.store(keys, chunks)
    assert list(faulty.blocks.items()) == [(name_of(one, keys[0]), content(chunks[0]))]


def name_of(worker: Any, key: Any) -> Any:
    """The name of a chunk's block, as the connector gives it to its client."""
    return worker.connector._names([key])[0]
