"""Names, layouts and settings: what the backend decides, without SGLang."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest

from mooncache.connectors.sglang.core.layout import PageShape, k_before_v
from mooncache.connectors.sglang.core.pages import (
    Rank,
    leading,
    page_names,
    ranks_of_page,
    trailing_ends,
    whole_pages,
)
from mooncache.connectors.sglang.core.server_settings import relevant, takes_media
from mooncache.connectors.sglang.engine_passport import EngineIdentity, check_version, passport_of
from mooncache.errors import ConfigInvalid

SHAPE = PageShape(
    pool="MHATokenToKVPoolHost",
    layout="page_first",
    layers=(0, 2),
    layer_count=2,
    heads=4,
    widths=(16, 16),
    piece_bytes=(1024, 1024),
)
FACTS = EngineIdentity(
    engine="sglang-0.5", weights_digest="w", config_digest="c", kv_cache_dtype="auto", lora=""
)


def test_each_rank_has_its_own_pages() -> None:
    assert ranks_of_page(tp_rank=1, tp_size=4, replicated=False) == (Rank(1, 4),)


def test_ranks_that_hold_the_same_share_a_page_whatever_their_number() -> None:
    assert {ranks_of_page(tp_rank=r, tp_size=n, replicated=True) for n in (1, 2, 8) for r in range(n)} == {
        (Rank(0, 1),)
    }


def test_a_small_fleet_holds_the_shards_of_a_larger_one() -> None:
    whole = ranks_of_page(tp_rank=0, tp_size=1, replicated=False, split_into=4)
    halves = [ranks_of_page(tp_rank=r, tp_size=2, replicated=False, split_into=4) for r in range(2)]
    quarters = [ranks_of_page(tp_rank=r, tp_size=4, replicated=False, split_into=4) for r in range(4)]
    assert whole == tuple(itertools.chain(*halves)) == tuple(itertools.chain(*quarters))


def test_names_go_page_by_page() -> None:
    assert page_names(["r0", "r1"], ["a", "b"]) == [
        "sglang/r0/a",
        "sglang/r1/a",
        "sglang/r0/b",
        "sglang/r1/b",
    ]


def test_a_page_is_there_when_all_of_its_blocks_are() -> None:
    assert whole_pages([True, True, True, False], 2) == [True, False]
    assert leading([True, True, False, True]) == 2
    assert leading([]) == 0


def test_a_window_may_end_where_all_of_it_is_there() -> None:
    pages = [False, True, True, True, False, True]
    assert trailing_ends(pages, 1) == [2, 3, 4, 6]
    assert trailing_ends(pages, 2) == [3, 4]
    assert trailing_ends([True, True], 5) == [1, 2]  # the window reaches beyond the start
    assert trailing_ends([False, True], 5) == []


def test_pieces_of_k_come_first() -> None:
    assert k_before_v(["k0", "v0", "k1", "v1"]) == ["k0", "k1", "v0", "v1"]


def test_layouts_with_the_same_order_share() -> None:
    per_layer = replace(SHAPE, layout="layer_first", piece_bytes=(512,) * 4)
    assert per_layer.describe() == replace(SHAPE, layout="page_first_direct").describe()
    assert per_layer.interleaved
    assert not SHAPE.interleaved


@pytest.mark.parametrize(
    "other",
    [
        replace(SHAPE, layout="page_first_direct"),
        replace(SHAPE, layout="page_head"),
        replace(SHAPE, layout="page_unified"),
        replace(SHAPE, pool="MLATokenToKVPoolHost"),
        replace(SHAPE, pool="SomeOtherPoolHost"),
        replace(SHAPE, layers=(2, 4)),
        replace(SHAPE, layer_count=3),
        replace(SHAPE, heads=2, widths=(32, 32)),
        replace(SHAPE, piece_bytes=(2048, 2048)),
        replace(SHAPE, page_format="unified-token-major"),
    ],
)
def test_other_bytes_have_another_description(other: PageShape) -> None:
    assert other.describe() != SHAPE.describe()


def test_an_unknown_pool_shares_with_its_equal_alone() -> None:
    unknown = replace(SHAPE, pool="SomeOtherPoolHost")
    assert unknown.describe() == replace(unknown).describe()
    assert unknown.describe() != replace(unknown, piece_bytes=(512, 1536)).describe()


def test_a_group_of_heads_is_described_as_the_page_of_a_rank_that_has_no_more() -> None:
    large = replace(SHAPE, layout="page_head", heads=4, piece_bytes=(1024, 1024))
    small = replace(SHAPE, layout="page_head", heads=2, piece_bytes=(512, 512))
    assert large.share(2).describe() == small.describe()


FIELDS = {
    "pool": "kv",
    "layout": "l",
    "dtype": "bfloat16",
    "page_tokens": 64,
    "rank": Rank(0, 2),
    "pp": Rank(0, 2),
    "cp": Rank(0, 2),
}


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("pool", "draft"),
        ("layout", "m"),
        ("dtype", "float16"),
        ("page_tokens", 32),
        ("rank", Rank(1, 2)),
        ("rank", Rank(0, 4)),
        ("pp", Rank(1, 2)),
        ("pp", Rank(0, 1)),
        ("cp", Rank(1, 2)),
        ("cp", Rank(0, 1)),
    ],
)
def test_pools_that_differ_have_other_roots(name: str, value: object) -> None:
    one = passport_of(FACTS, **FIELDS)  # type: ignore[arg-type]
    assert passport_of(FACTS, **{**FIELDS, name: value}).root() != one.root()  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["engine", "weights_digest", "config_digest", "kv_cache_dtype", "lora"])
def test_engines_that_differ_have_other_roots(name: str) -> None:
    one = passport_of(FACTS, **FIELDS)  # type: ignore[arg-type]
    assert passport_of(replace(FACTS, **{name: "x"}), **FIELDS).root() != one.root()  # type: ignore[arg-type]


NAMESPACES = {"kv_cache_dtype": "model", "cuda_graph_config": "exec.graph", "port": "serving"}


def test_settings_of_what_is_computed_count_and_others_do_not() -> None:
    resolved = {"kv_cache_dtype": "auto", "cuda_graph_config": "a", "port": 1}
    assert relevant(resolved, NAMESPACES) == {"kv_cache_dtype": "'auto'"}


def test_a_setting_that_nobody_knows_here_counts() -> None:
    assert "brand_new" in relevant({"brand_new": 1}, {"brand_new": "exec.kernel"})


@pytest.mark.parametrize(("method", "counts"), [(None, False), ("NGRAM", False), ("EAGLE", True)])
def test_drafts_count_when_a_model_makes_them(method: str | None, counts: bool) -> None:
    spaces = {"speculative_algorithm": "spec", "speculative_num_steps": "spec"}
    found = relevant({"speculative_algorithm": method, "speculative_num_steps": 3}, spaces)
    assert ("speculative_num_steps" in found) is counts


def test_models_that_take_media_are_told_by_their_configuration() -> None:
    assert takes_media({"hidden_size": 1, "vision_config": {}}) == "vision_config"
    assert not takes_media({"hidden_size": 1, "vocab_size": 2})


@pytest.mark.parametrize("version", ["0.5.23", "0.5.24.post1", "0.5.99"])
def test_versions_with_the_interface_are_taken(version: str) -> None:
    assert check_version(version) == "0.5"


@pytest.mark.parametrize("version", ["0.4.9", "0.5.22", "0.6.0", "1.0.0", "nightly"])
def test_other_versions_are_refused_by_name(version: str) -> None:
    with pytest.raises(ConfigInvalid, match=f"SGLang {version} .* from 0.5.23 on"):
        check_version(version)
