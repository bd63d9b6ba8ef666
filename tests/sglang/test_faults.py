"""Whatever happens to the pool, SGLang gets an answer in time, never wrong bytes, and finds the pool again."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import mooncache
from mooncache.auth import create_cluster_token
from mooncache.cluster.embedded import EmbeddedCluster
from mooncache.errors import ChecksumMismatch, NoSpace
from tests.client.conftest import make_cluster
from tests.conditions import wait_until
from tests.kvcache.faulty import FaultyPool
from tests.processes import freeze
from tests.sglang.package import need_sglang

need_sglang()

from mooncache.connectors.sglang import backend as backend_module  # noqa: E402
from tests.sglang.pools import fill, hashes, indices, mha_pool, page_bytes, prompt  # noqa: E402

Make = Callable[..., Any]
SOON = {"mooncache.load_timeout_s": 1.0, "mooncache.save_timeout_s": 1.0}


@pytest.fixture
def fragile(tmp_path: Path) -> Iterator[EmbeddedCluster]:
    """One node, for tests that break it."""
    with make_cluster(tmp_path / "pool", nodes=1) as running:
        yield running


@pytest.fixture
def faulty(monkeypatch: pytest.MonkeyPatch) -> FaultyPool:
    """The pool that backends of this test connect to."""
    pool = FaultyPool()
    monkeypatch.setattr(backend_module, "connect_pool", lambda **_: lambda: pool)
    return pool


def test_a_dead_node_is_a_miss_and_its_restart_is_found(make: Make, fragile: EmbeddedCluster) -> None:
    pool, keys = mha_pool("page_first"), hashes(prompt(2, "dead"))
    backend = make(pool, SOON, at=fragile)
    assert backend.batch_set_v1(keys, indices([0, 1])) == [True, True]
    fragile.kill("node-1")
    assert backend.batch_get_v1(keys, indices([2, 3])) == [False, False]
    assert backend.batch_exists(keys) == 0
    assert backend.batch_set_v1(keys, indices([0, 1])) == [False, False]
    fragile.restart("node-1")
    wait_until(lambda: all(backend.batch_set_v1(keys, indices([0, 1]))), "the node takes pages again")
    assert backend.batch_get_v1(keys, indices([2, 3])) == [True, True]
    assert page_bytes(pool, 2) == page_bytes(pool, 0)


def test_a_node_that_hangs_costs_a_time_limit_and_then_nothing(make: Make, fragile: EmbeddedCluster) -> None:
    pool, keys = mha_pool("page_first"), hashes(prompt(2, "hangs"))
    backend = make(pool, SOON, at=fragile)
    assert backend.batch_set_v1(keys, indices([0, 1])) == [True, True]
    freeze(fragile.parts["node-1"].pid)
    try:
        for _ in range(3):
            assert backend.batch_get_v1(keys, indices([2, 3])) == [False, False]
        assert backend._link.client() is None, "the breaker is open"
        assert backend.batch_exists(keys) == 0
    finally:
        fragile.parts["node-1"].send(signal.SIGCONT)
    wait_until(lambda: all(backend.batch_get_v1(keys, indices([2, 3]))), "pages come again")
    assert page_bytes(pool, 3) == page_bytes(pool, 1)


def test_a_pool_without_room_takes_no_page(make: Make, fragile: EmbeddedCluster) -> None:
    """Others have reserved all memory of the node, so no eviction makes room."""
    pool, keys = mha_pool("page_first"), hashes(prompt(2, "full"))
    backend = make(pool, SOON, at=fragile)
    with mooncache.connect(**fragile.client_settings()) as client:
        held = [*reserved(client, 1 << 20), *reserved(client, 64 << 10), *reserved(client, 4 << 10)]
        assert backend.batch_set_v1(keys, indices([0, 1])) == [False, False]
        assert backend.batch_exists(keys) == 0
        for reservation in held:
            reservation.abort()
        assert backend.batch_set_v1(keys, indices([0, 1])) == [True, True]


def reserved(client: mooncache.Client, size_bytes: int) -> Iterator[Any]:
    """Reservations until there is no space for a further one."""
    while True:
        try:
            yield client.reserve(os.urandom(32), size_bytes)
        except NoSpace:
            return


def test_a_page_that_is_damaged_is_a_miss(make: Make, faulty: FaultyPool) -> None:
    pool, keys = mha_pool("page_first"), hashes(prompt(3, "damaged"))
    backend = make(pool)
    assert backend.batch_set_v1(keys, indices([0, 1, 2])) == [True] * 3
    faulty.codes[backend_key(backend, keys[1])] = ChecksumMismatch.code
    assert backend.batch_get_v1(keys, indices([3, 4, 5])) == [True, False, True]


def test_a_page_of_another_size_is_a_miss(make: Make, faulty: FaultyPool) -> None:
    pool, keys = mha_pool("page_first"), hashes(prompt(2, "size"))
    backend = make(pool)
    assert backend.batch_set_v1(keys, indices([0, 1])) == [True] * 2
    faulty.sizes[backend_key(backend, keys[0])] = 7
    assert backend.batch_get_v1(keys, indices([3, 4])) == [False, True]


def backend_key(backend: Any, page: str) -> str:
    """The key of a page's block, as the backend gives it to its client."""
    return str(backend._names("kv", [page])[0])


def test_a_call_that_raises_is_a_miss_and_later_calls_leave_the_pool_alone(
    make: Make, faulty: FaultyPool
) -> None:
    pool, keys = mha_pool("page_first"), hashes(prompt(2, "raises"))
    backend = make(pool)
    faulty.error = RuntimeError("a defect of the client")
    for _ in range(3):
        assert backend.batch_get_v1(keys, indices([0, 1])) == [False, False]
    asked = len(faulty.calls)
    assert backend.batch_set_v1(keys, indices([0, 1])) == [False, False]
    assert backend.batch_exists(keys) == 0
    assert len(faulty.calls) == asked


@pytest.mark.parametrize("wrong", [indices([0]), indices([0, 1, 2]), None])
def test_indices_that_do_not_fit_are_misses(make: Make, faulty: FaultyPool, wrong: Any) -> None:
    backend, keys = make(mha_pool("page_first")), hashes(prompt(2, "indices"))
    assert backend.batch_set_v1(keys, wrong) == [False, False]
    assert backend.batch_get_v1(keys, wrong) == [False, False]
    assert not faulty.blocks


def test_an_index_outside_of_the_pool_moves_no_byte(make: Make, faulty: FaultyPool) -> None:
    backend, keys = make(mha_pool("page_first")), hashes(prompt(1, "outside"))
    assert backend.batch_set_v1(keys, indices([1000])) == [False]
    assert not faulty.blocks


def test_an_engine_starts_without_the_pool_and_uses_it_later(
    make: Make, fragile: EmbeddedCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(backend_module, "CONNECT_WAIT_S", 0.1)
    fragile.kill("master")
    pool, keys = mha_pool("page_first"), hashes(prompt(2, "late"))
    backend = make(pool, SOON, at=fragile)
    assert backend.batch_set_v1(keys, indices([0, 1])) == [False, False]
    assert backend.batch_exists(keys) == 0
    fragile.restart("master")
    wait_until(lambda: all(backend.batch_set_v1(keys, indices([0, 1]))), "the pool is used")


def test_a_wrong_token_is_no_pool(
    make: Make, cluster: EmbeddedCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(backend_module, "CONNECT_WAIT_S", 0.5)
    create_cluster_token(tmp_path / cluster.token_path.name)
    extra = {**SOON, "mooncache.state_dir": str(tmp_path), "mooncache.master_targets": cluster.master_target}
    backend, keys = make(mha_pool("page_first"), extra), hashes(prompt(2, "token"))
    assert backend.batch_set_v1(keys, indices([0, 1])) == [False, False]
    assert backend.batch_exists(keys) == 0


def test_switched_off(make: Make) -> None:
    backend, keys = make(mha_pool("page_first"), {"mooncache.enabled": False}), hashes(prompt(1, "off"))
    assert backend.batch_set_v1(keys, indices([0])) == [False]
    assert backend.batch_exists(keys) == 0


def test_calls_after_the_end_are_misses(make: Make) -> None:
    backend, keys = make(mha_pool("page_first")), hashes(prompt(1, "end"))
    assert backend.batch_set_v1(keys, indices([0])) == [True]
    backend.close()
    assert backend.batch_exists(keys) == 0
    assert backend.batch_get_v1(keys, indices([0])) == [False]


def test_sglangs_own_failure_injector(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """It answers for the backend at random: what came is right, and what it refused can be asked again."""
    monkeypatch.setenv("SGLANG_TEST_HICACHE_BACKEND_RANDOM_FAILURE", "0.5")
    monkeypatch.setenv("SGLANG_TEST_HICACHE_BACKEND_RANDOM_DELAY", "0.002")
    ours, theirs = mha_pool("page_first"), fill(mha_pool("page_first"), seed=5)
    writer, reader = make(ours), make(theirs)
    assert type(reader).__name__ == "HiCacheStorageFailureInjector"
    keys, came = hashes(prompt(4, "injector")), 0
    wait_until(lambda: all(writer.batch_set_v1(keys, indices([0, 1, 2, 3]))), "a set that is not refused")
    for _ in range(20):
        if reader.batch_exists(keys) == 4 and all(reader.batch_get_v1(keys, indices([4, 5, 6, 7]))):
            came += 1
            assert [page_bytes(theirs, 4 + i) for i in range(4)] == [page_bytes(ours, i) for i in range(4)]
            fill(theirs, seed=came)
    assert came
