"""Models with several host pools: each pool's pages by its own policy, in one call (interface v2)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.sglang.package import need_sglang

need_sglang()

from sglang.srt.mem_cache.hicache_storage import PoolHitPolicy, PoolName, PoolTransfer  # noqa: E402

from tests.sglang.pools import fill, hashes, indices, mha_pool, mla_pool, page_bytes, prompt  # noqa: E402

Make = Callable[..., Any]


def with_window(make: Make, seed: int = 0, **facts: Any) -> tuple[Any, Any, Any]:
    """(backend, host pool of the KV, host pool of the layers with a sliding window) of one engine."""
    full, window = mha_pool("page_first"), fill(mha_pool("page_first", heads=2), seed=8)
    if seed:
        fill(full, seed)
        fill(window, seed + 1)
    backend = make(full, **facts)
    backend.register_mem_host_pool_v2(full, PoolName.KV)
    backend.register_mem_host_pool_v2(window, PoolName.SWA)
    backend.on_host_pools_registered()
    return backend, full, window


def swa(keys: list[str], pages: list[int]) -> Any:
    return PoolTransfer(
        PoolName.SWA, host_indices=indices(pages), keys=keys, hit_policy=PoolHitPolicy.TRAILING_PAGES
    )


def kv(keys: list[str], pages: list[int]) -> Any:
    return PoolTransfer(PoolName.KV, host_indices=indices(pages), keys=keys)


def test_pages_of_both_pools_come_back(make: Make) -> None:
    writer, full, window = with_window(make)
    reader, other_full, other_window = with_window(make, seed=20)
    keys = hashes(prompt(3, "both"))
    stored = writer.batch_set_v2([kv(keys, [0, 1, 2]), swa(keys[1:], [3, 4])])
    assert stored == {PoolName.KV: [True] * 3, PoolName.SWA: [True] * 2}
    came = reader.batch_get_v2([kv(keys, [5, 6, 7]), swa(keys, [5, 6, 7])])
    assert came == {PoolName.KV: [True] * 3, PoolName.SWA: [False, True, True]}
    assert page_bytes(other_full, 7) == page_bytes(full, 2)
    assert page_bytes(other_window, 7) == page_bytes(window, 4)


def test_a_prefix_may_end_where_every_pool_can_restore_it(make: Make) -> None:
    backend, _, _ = with_window(make)
    keys = hashes(prompt(6, "ends"))
    backend.batch_set_v2([kv(keys[:5], [0, 1, 2, 3, 4]), swa([keys[1], keys[2], keys[4]], [0, 1, 2])])
    query = PoolTransfer(PoolName.SWA, keys=keys[:2], hit_policy=PoolHitPolicy.TRAILING_PAGES)
    found = backend.batch_exists_v2(keys, [query])
    # A window of two pages: only pages 2 and 3 are both there.
    assert (found.kv_hit_pages, found.restorable_prefix_pages) == (3, [3])
    assert found.extra_pool_hit_pages == {PoolName.KV: 5, PoolName.SWA: 3}
    one = PoolTransfer(PoolName.SWA, keys=keys[:1], hit_policy=PoolHitPolicy.TRAILING_PAGES)
    assert backend.batch_exists_v2(keys, [one]).restorable_prefix_pages == [2, 3, 5]
    every = PoolTransfer(PoolName.SWA, hit_policy=PoolHitPolicy.ALL_PAGES)
    assert backend.batch_exists_v2(keys, [every]).kv_hit_pages == 0
    assert backend.batch_exists_v2(keys).kv_hit_pages == 5


def test_groups_of_pages_do_not_shorten_the_prefix(make: Make) -> None:
    backend, _, _ = with_window(make)
    keys = hashes(prompt(2, "groups"))
    backend.batch_set_v1(keys, indices([0, 1]))
    groups = PoolTransfer(PoolName.SWA, keys=keys, hit_policy=PoolHitPolicy.BLOCK_GROUPS)
    found = backend.batch_exists_v2(keys, [groups])
    assert found.kv_hit_pages == 2
    assert PoolName.SWA not in found.extra_pool_hit_pages


def test_pools_with_the_same_hashes_do_not_mix(make: Make) -> None:
    full = mha_pool("page_first")
    backend = make(full)
    backend.register_mem_host_pool_v2(fill(mha_pool("page_first"), seed=9), PoolName.DRAFT)
    keys = hashes(prompt(1, "pools"))
    backend.batch_set_v2([PoolTransfer(PoolName.DRAFT, host_indices=indices([0]), keys=keys)])
    assert backend.batch_exists(keys) == 0


def test_a_pool_that_nobody_registered_is_a_miss(make: Make) -> None:
    backend = make(mha_pool("page_first"))
    keys = hashes(prompt(1, "unknown"))
    assert backend.batch_set_v1(keys, indices([0])) == [True]
    mamba = PoolTransfer(PoolName.MAMBA, host_indices=indices([0]), keys=keys)
    assert backend.batch_get_v2([mamba]) == {PoolName.MAMBA: [False]}
    assert backend.batch_set_v2([mamba]) == {PoolName.MAMBA: [False]}
    assert backend.batch_exists_v2(keys, [mamba]).kv_hit_pages == 0


def test_draft_heads_of_a_latent_model_belong_to_their_rank(make: Make) -> None:
    """The KV is one for all ranks, a draft model with heads is not."""
    keys, backends = hashes(prompt(1, "draft")), []
    for rank in range(2):
        backend = make(mla_pool("page_first"), is_mla_model=True, tp_rank=rank, tp_size=2)
        backend.register_mem_host_pool_v2(mha_pool("page_first"), PoolName.DRAFT)
        backends.append(backend)
    draft = PoolTransfer(PoolName.DRAFT, host_indices=indices([0]), keys=keys)
    backends[0].batch_set_v2([draft])
    backends[0].batch_set_v1(keys, indices([0]))
    assert backends[0].batch_exists_v2(keys, [draft]).kv_hit_pages == 1
    assert backends[1].batch_exists(keys) == 1
    assert backends[1].batch_exists_v2(keys, [draft]).kv_hit_pages == 0


@pytest.mark.parametrize("wrong", [None, indices([0, 1])])
def test_indices_that_do_not_fit_are_misses(make: Make, wrong: Any) -> None:
    backend, _, _ = with_window(make)
    keys = hashes(prompt(1, "v2 indices"))
    assert backend.batch_set_v2([PoolTransfer(PoolName.SWA, host_indices=wrong, keys=keys)]) == {
        PoolName.SWA: [False]
    }
