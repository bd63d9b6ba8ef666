"""Whatever happens to the pool, LMCache gets an answer in time, never wrong bytes, and finds the pool again."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import mooncache
from mooncache.auth import create_cluster_token
from mooncache.cluster.embedded import EmbeddedCluster
from mooncache.errors import ChecksumMismatch, NoSpace
from tests.conditions import wait_until
from tests.kvcache.faulty import FaultyPool
from tests.lmcache.package import need_lmcache
from tests.processes import freeze

need_lmcache()

from mooncache.connectors.lmcache import pool as pool_module  # noqa: E402
from tests.lmcache.servers import content, keys  # noqa: E402

Make = Callable[..., Any]
SOON = {"mooncache.load_timeout_s": 1.0, "mooncache.save_timeout_s": 1.0}


def test_a_dead_node_is_a_miss_and_its_restart_is_found(
    worker: Make, server: Make, fragile: EmbeddedCluster
) -> None:
    one, other = worker(SOON, at=fragile), server(SOON, at=fragile)
    asked, chunks = one.keys(1), one.chunks(1)
    objects = other.objects([0, 1], [1, 2])
    one.store(asked, chunks)
    assert other.store(keys(1, 2), objects).is_successful()
    fragile.kill("node-1")
    assert one.load(asked) == [None]
    assert one.remote.batched_contains(asked) == 0
    assert other.lookup(keys(1, 2)) == [False, False]
    assert other.load(keys(1, 2), other.objects([2, 3], [None, None])) == [False, False]
    assert not other.store(keys(1, 2), objects).is_successful()
    fragile.restart("node-1")
    wait_until(lambda: other.store(keys(1, 2), objects).is_successful(), "the node takes objects again")
    came = other.objects([2, 3], [None, None])
    assert other.load(keys(1, 2), came) == [True, True]
    assert list(map(content, came)) == list(map(content, objects))
    wait_until(
        lambda: (one.store(asked, chunks), one.load(asked))[1] == [content(chunks[0])], "chunks come back"
    )


def test_a_node_that_hangs_costs_a_time_limit_and_then_nothing(
    worker: Make, server: Make, fragile: EmbeddedCluster
) -> None:
    one, other = worker(SOON, at=fragile), server(SOON, at=fragile)
    asked, chunks = one.keys(11), one.chunks(11)
    one.store(asked, chunks)
    assert other.store(keys(11), other.objects([0], [11])).is_successful()
    freeze(fragile.parts["node-1"].pid)
    try:
        wait_until(lambda: left_alone(one.load(asked), [None], one.connector), "the worker's breaker is open")
        wait_until(
            lambda: left_alone(other.load(keys(11), other.objects([1], [None])), [False], other.adapter),
            "the server's breaker is open",
        )
    finally:
        fragile.parts["node-1"].send(signal.SIGCONT)
    wait_until(lambda: one.load(asked) == [content(chunks[0])], "chunks come again")
    wait_until(lambda: other.load(keys(11), other.objects([1], [None])) == [True], "objects come again")


def left_alone(found: list[Any], nothing: list[Any], plugin: Any) -> bool:
    """Whether the pool is left alone after a load, which brought nothing."""
    assert found == nothing
    return not plugin._pool.link.usable


def test_a_pool_without_room_takes_nothing(worker: Make, server: Make, fragile: EmbeddedCluster) -> None:
    """Others have reserved all memory of the node, so no eviction makes room."""
    one, other = worker(SOON, at=fragile), server(SOON, at=fragile)
    with mooncache.connect(**fragile.client_settings()) as client:
        held = [*reserved(client, 1 << 20), *reserved(client, 64 << 10), *reserved(client, 4 << 10)]
        one.store(one.keys(21), one.chunks(21))
        assert one.load(one.keys(21)) == [None]
        assert not other.store(keys(21), other.objects([0], [21])).is_successful()
        for reservation in held:
            reservation.abort()
        assert other.store(keys(21), other.objects([0], [21])).is_successful()


def reserved(client: mooncache.Client, size_bytes: int) -> Iterator[Any]:
    """Reservations until there is no space for a further one."""
    while True:
        try:
            yield client.reserve(os.urandom(32), size_bytes)
        except NoSpace:
            return


def test_what_is_damaged_or_has_another_size_is_a_miss(
    worker: Make, server: Make, faulty: FaultyPool
) -> None:
    one, other = worker(), server()
    one.store(one.keys(31, 32, 33), one.chunks(31, 32, 33))
    assert other.store(keys(31, 32, 33), other.objects([0, 1, 2], [31, 32, 33])).is_successful()
    names = list(faulty.blocks)
    free_bytes = one.free_bytes()
    for damaged, short in ((names[0], names[1]), (names[3], names[4])):
        faulty.codes[damaged] = ChecksumMismatch.code
        faulty.sizes[short] = 7
    assert [found is not None for found in one.load(one.keys(31, 32, 33))] == [False, False, True]
    assert one.free_bytes() == free_bytes
    assert other.load(keys(31, 32, 33), other.objects([3, 4, 5], [None] * 3)) == [False, False, True]


def test_calls_that_raise_are_misses_and_later_calls_leave_the_pool_alone(
    worker: Make, server: Make, faulty: FaultyPool
) -> None:
    one, other = worker(), server()
    free_bytes = one.free_bytes()
    faulty.error = RuntimeError("a defect of the client")
    for _ in range(3):
        assert one.load(one.keys(41)) == [None]
        assert other.load(keys(41), other.objects([0], [None])) == [False]
    assert one.free_bytes() == free_bytes
    asked = len(faulty.calls)
    assert one.remote.batched_contains(one.keys(41)) == 0
    assert not other.store(keys(41), other.objects([0], [41])).is_successful()
    assert len(faulty.calls) == asked


def test_memory_that_is_none_of_the_hosts_moves_no_byte(
    worker: Make, server: Make, faulty: FaultyPool
) -> None:
    one, other = worker(), server()

    class Elsewhere:
        byte_array = b"in no memory of the host's"

        metadata = SimpleNamespace(shapes=[(2, 2)], dtypes=["float16"])

        def get_size(self) -> int:
            return 8

        def ref_count_up(self) -> None:
            """Nothing to count."""

        def ref_count_down(self) -> None:
            """Nothing to count."""

    one.store(one.keys(51), [Elsewhere()])
    assert not other.store(keys(51), [Elsewhere()]).is_successful()
    assert other.load(keys(51), [Elsewhere()]) == [False]
    assert not faulty.blocks


def test_a_start_without_the_pool_uses_it_later(
    worker: Make, server: Make, fragile: EmbeddedCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pool_module, "CONNECT_WAIT_S", 0.1)
    fragile.kill("master")
    one, other = worker(SOON, at=fragile), server(SOON, at=fragile)
    chunks, objects = one.chunks(61), other.objects([0], [61])
    one.store(one.keys(61), chunks)
    assert one.load(one.keys(61)) == [None]
    assert not other.store(keys(61), objects).is_successful()
    fragile.restart("master")
    wait_until(lambda: other.store(keys(61), objects).is_successful(), "the server uses the pool")
    wait_until(
        lambda: (one.store(one.keys(61), chunks), one.load(one.keys(61)))[1] == [content(chunks[0])],
        "the worker uses the pool",
    )


def test_a_wrong_token_is_no_pool(
    server: Make, cluster: EmbeddedCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pool_module, "CONNECT_WAIT_S", 0.5)
    create_cluster_token(tmp_path / cluster.token_path.name)
    other = server({"mooncache.state_dir": str(tmp_path), "mooncache.master_targets": cluster.master_target})
    assert not other.store(keys(71), other.objects([0], [71])).is_successful()
    assert other.lookup(keys(71)) == [False]


def test_switched_off(worker: Make, server: Make) -> None:
    one, other = worker({"mooncache.enabled": False}), server({"mooncache.enabled": False})
    one.store(one.keys(81), one.chunks(81))
    assert one.load(one.keys(81)) == [None]
    assert not other.store(keys(81), other.objects([0], [81])).is_successful()
    assert other.lookup(keys(81)) == [False]
