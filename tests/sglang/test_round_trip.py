"""Pages of real host pools go to a real node and come back into another engine's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import mooncache
from mooncache.cluster.embedded import EmbeddedCluster
from tests.sglang.package import need_sglang

need_sglang()

from tests.sglang import pools  # noqa: E402  (imports what need_sglang has made importable)
from tests.sglang.pools import HEADS, LAYOUTS, MLA_LAYOUTS, fill, hashes, indices, page_bytes, prompt  # noqa: E402

Make = Callable[..., Any]


@pytest.fixture(
    params=[*(("mha", layout) for layout in LAYOUTS), *(("mla", layout) for layout in MLA_LAYOUTS)]
)
def kind(request: pytest.FixtureRequest) -> tuple[Callable[[], Any], dict[str, Any], str]:
    """A maker of host pools, what SGLang says of them, and their name."""
    family, layout = request.param
    maker = pools.mha_pool if family == "mha" else pools.mla_pool
    return lambda: maker(layout), {"is_mla_model": family == "mla"}, f"{family} {layout}"


def test_pages_come_back_in_another_engine(make: Make, kind: Any) -> None:
    maker, facts, name = kind
    ours, theirs = maker(), fill(maker(), seed=2)
    keys = hashes(prompt(3, name))
    writer, reader = make(ours, **facts), make(theirs, **facts)
    assert reader.batch_exists(keys) == 0
    assert reader.batch_get_v1(keys, indices([0, 1, 2])) == [False] * 3
    assert writer.batch_set_v1(keys, indices([4, 0, 7])) == [True] * 3
    assert reader.batch_exists(keys) == 3
    before = {page: page_bytes(theirs, page) for page in range(pools.PAGES)}
    assert reader.batch_get_v1(keys, indices([1, 9, 3])) == [True] * 3
    for here, there in ((4, 1), (0, 9), (7, 3)):
        assert page_bytes(ours, here) == page_bytes(theirs, there)
        before.pop(there)
    assert all(page_bytes(theirs, page) == content for page, content in before.items())


def test_a_block_has_the_bytes_of_sglangs_own_flat_page(
    make: Make, kind: Any, cluster: EmbeddedCluster
) -> None:
    maker, facts, name = kind
    pool = maker()
    (key,) = hashes(prompt(1, f"flat {name}"))
    writer = make(pool, **facts)
    assert writer.batch_set_v1([key], indices([5])) == [True]
    with mooncache.connect(**cluster.client_settings()) as client:
        assert client.get(writer._names("kv", [key])[0]) == page_bytes(pool, 5)


def test_the_prefix_ends_at_the_first_page_that_is_missing(make: Make) -> None:
    backend = make(pools.mha_pool("page_first"))
    keys = hashes(prompt(5, "prefix"))
    stored = [keys[0], keys[1], keys[3]]
    assert backend.batch_set_v1(stored, indices([0, 1, 2])) == [True] * 3
    assert backend.batch_exists(keys) == 2
    assert [backend.exists(key) for key in keys] == [True, True, False, True, False]
    assert backend.batch_get_v1(keys, indices([5, 6, 7, 8, 9])) == [True, True, False, True, False]


def test_a_page_that_is_there_counts_as_stored(make: Make) -> None:
    pool = pools.mha_pool("page_first")
    keys = hashes(prompt(2, "twice"))
    assert make(pool).batch_set_v1(keys, indices([0, 1])) == [True, True]
    assert make(pool).batch_set_v1(keys, indices([0, 1])) == [True, True]


def test_layouts_with_the_same_bytes_share_and_others_do_not(make: Make) -> None:
    written, keys = pools.mha_pool("layer_first"), hashes(prompt(2, "layouts"))
    make(written).batch_set_v1(keys, indices([2, 3]))
    direct = fill(pools.mha_pool("page_first_direct"), seed=3)
    reader = make(direct)
    assert reader.batch_get_v1(keys, indices([6, 7])) == [True, True]
    assert page_bytes(direct, 6) == page_bytes(written, 2)
    assert make(pools.mha_pool("page_first")).batch_exists(keys) == 0
    assert make(pools.mha_pool("page_head")).batch_exists(keys) == 0


def raw(pool: Any) -> torch.Tensor:
    """All of a pool as bytes."""
    return pool.kv_buffer.view(torch.uint8)  # type: ignore[no-any-return]


def test_fleets_of_other_sizes_read_each_others_heads(make: Make) -> None:
    """One rank with all heads writes; two ranks with half of them each read, and the other way round."""
    whole, keys = pools.mha_pool("page_head"), hashes(prompt(2, "heads"))
    half = HEADS // 2
    halves = [fill(pools.mha_pool("page_head", heads=half), seed=rank) for rank in range(2)]
    large = make(whole, tp_lcm_size=2, should_split_heads=True)
    small = [make(halves[rank], tp_rank=rank, tp_size=2, tp_lcm_size=2) for rank in range(2)]
    assert large.batch_set_v1(keys, indices([0, 1])) == [True, True]
    assert large.get_stats().backup_pgs == [2]
    for rank, reader in enumerate(small):
        assert reader.batch_get_v1(keys, indices([3, 4])) == [True, True]
        mine = slice(rank * half, (rank + 1) * half)
        assert raw(whole)[:, 1, mine].equal(raw(halves[rank])[:, 4])
    back = hashes(prompt(1, "heads back"))
    assert small[0].batch_set_v1(back, indices([5])) == [True]
    assert large.batch_exists(back) == 0  # half of its heads are missing
    assert small[1].batch_set_v1(back, indices([5])) == [True]
    assert large.batch_get_v1(back, indices([7])) == [True]
    assert raw(whole)[:, 7, half:].equal(raw(halves[1])[:, 5])


def test_ranks_of_a_latent_model_share_one_page(make: Make) -> None:
    ours, theirs = pools.mla_pool("page_first"), fill(pools.mla_pool("page_first"), seed=4)
    keys = hashes(prompt(2, "latent"))
    make(ours, is_mla_model=True, tp_rank=0, tp_size=2).batch_set_v1(keys, indices([0, 1]))
    second = make(theirs, is_mla_model=True, tp_rank=1, tp_size=2)
    assert second.batch_get_v1(keys, indices([4, 5])) == [True, True]
    assert page_bytes(theirs, 5) == page_bytes(ours, 1)
    alone = make(theirs, is_mla_model=True)
    assert alone.batch_exists(keys) == 2


def test_after_a_clear_nothing_from_before_is_found(make: Make) -> None:
    pool, keys = pools.mha_pool("page_first"), hashes(prompt(2, "clear"))
    backend, other = make(pool), make(pool)
    backend.batch_set_v1(keys, indices([0, 1]))
    backend.clear()
    assert backend.batch_exists(keys) == 0
    assert other.batch_exists(keys) == 2
    assert backend.batch_set_v1(keys, indices([2, 3])) == [True, True]
    assert backend.batch_exists(keys) == 2
    assert other.batch_get_v1(keys, indices([5, 6])) == [True, True]
    assert page_bytes(pool, 5) == page_bytes(pool, 0)


def test_sglang_gets_pages_and_bandwidth_of_each_call(make: Make) -> None:
    pool, keys = pools.mha_pool("page_first"), hashes(prompt(3, "stats"))
    backend = make(pool)
    backend.batch_set_v1(keys[:2], indices([0, 1]))
    backend.batch_get_v1(keys, indices([0, 1, 2]))
    stats = backend.get_stats()
    assert (stats.backup_pgs, stats.prefetch_pgs) == ([2], [2])
    assert stats.backup_bandwidth[0] > 0
    assert stats.prefetch_bandwidth[0] > 0
    assert backend.get_stats().prefetch_pgs == []
