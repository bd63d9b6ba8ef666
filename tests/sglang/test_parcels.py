"""How KV is cut into parcels and heads; against SGLang's own rule where it is installed."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mooncache.connectors.sglang.core.parcels import KV, Cut, Heads, Piece, head_cut, parcels, pieces_of
from mooncache.connectors.sglang.core.ranks import RankLayout, pair_buffers, route
from mooncache.errors import InvalidArgument, PassportMismatch, TooLarge

HEAD_BYTES, TOKENS = 32, 4


def piece(rows: int, width: int, first: int = 0) -> Piece:
    return Piece(KV, 0, 0, first, rows, 1, 0, 0, width)


@given(st.lists(st.tuples(st.integers(1, 30), st.integers(1, 50)), max_size=8), st.integers(50, 400))
def test_parcels_have_all_rows_once_and_in_order(sizes: list[tuple[int, int]], most: int) -> None:
    pieces = [Piece(KV, at, at, 3, rows, 1, 0, 0, width) for at, (rows, width) in enumerate(sizes)]
    found = list(parcels(pieces, most))
    assert all(0 < sum(each.size_bytes for each in parcel) <= most for parcel in found)
    rows = [(each.source, each.first + at) for parcel in found for each in parcel for at in range(each.rows)]
    assert rows == [(each.source, 3 + at) for each in pieces for at in range(each.rows)]
    for one, two in itertools.pairwise(found):  # no row more would have fitted
        assert sum(each.size_bytes for each in one) + two[0].width_bytes > most


def test_a_row_larger_than_a_parcel() -> None:
    with pytest.raises(TooLarge, match="51 bytes"):
        list(parcels([piece(1, 51)], 50))


def test_no_rows_are_no_pieces() -> None:
    assert pieces_of(KV, [(0, 0)], [Cut.whole(8)], first=4, rows=0) == []


SIZES = [(1, 2), (2, 1), (2, 4), (4, 2), (8, 2), (2, 8), (1, 8), (8, 1), (8, 4)]


@pytest.mark.parametrize(("sources", "targets"), SIZES)
@pytest.mark.parametrize("total", [2, 4, 8])
def test_every_head_of_a_rank_comes_from_its_senders(sources: int, targets: int, total: int) -> None:
    for target in (Heads(targets, rank, total) for rank in range(targets)):
        mine: set[int] = set()
        for source in senders_of(sources, targets, target.rank, total):
            cut = cut_of(source, target)
            first = source.first + cut.source_offset_bytes // HEAD_BYTES
            assert first - target.first == cut.target_offset_bytes // HEAD_BYTES
            mine |= set(range(first, first + cut.width_bytes // HEAD_BYTES))
        assert mine == set(range(target.first, target.first + target.each))


@pytest.mark.parametrize(("sources", "targets"), SIZES)
@pytest.mark.parametrize("total", [2, 4, 8])
def test_the_cut_is_sglangs(sources: int, targets: int, total: int) -> None:
    from tests.sglang.package import need_sglang

    need_sglang()
    from sglang.srt.disaggregation.common.staging_buffer import compute_head_slice_params

    for rank in range(targets):
        for source in senders_of(sources, targets, rank, total):
            cut = cut_of(source, Heads(targets, rank, total))
            first, count, there, _ = compute_head_slice_params(sources, targets, source.rank, rank, total)
            assert (cut.source_offset_bytes, cut.target_offset_bytes, cut.width_bytes) == (
                first * HEAD_BYTES,
                there * HEAD_BYTES,
                count * HEAD_BYTES,
            )


def senders_of(sources: int, targets: int, rank: int, total: int) -> list[Heads]:
    """The ranks that SGLang sends from."""
    if sources <= targets:
        return [Heads(sources, rank // (targets // sources), total)]
    each = sources // targets
    return [Heads(sources, at, total) for at in range(rank * each, (rank + 1) * each)]


def cut_of(source: Heads, target: Heads) -> Cut:
    return head_cut(
        source,
        target,
        tokens=TOKENS,
        source_row_bytes=TOKENS * source.each * HEAD_BYTES,
        target_row_bytes=TOKENS * target.each * HEAD_BYTES,
    )


def test_ranks_without_a_common_head() -> None:
    with pytest.raises(InvalidArgument, match="no head in common"):
        cut_of(Heads(2, 0, 4), Heads(4, 3, 4))


def test_pages_of_other_heads() -> None:
    with pytest.raises(InvalidArgument, match="do not consist of"):
        head_cut(Heads(1, 0, 2), Heads(2, 0, 2), tokens=4, source_row_bytes=64, target_row_bytes=64)


def layout(**more: object) -> RankLayout:
    values: dict[str, object] = {
        "ranks": 1,
        "rank": 0,
        "page_tokens": 4,
        "latent": False,
        "heads": 2,
        "kv_row_bytes": (64, 64),
        "kv_layers": (0, 0),
        "state_kinds": (),
        "state_row_bytes": (),
        "state_layers": (),
        "metadata_row_bytes": (16,),
    }
    return RankLayout(**{**values, **more})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("more", "text"),
    [
        ({"page_tokens": 8}, "different page_tokens: 4 and 8"),
        ({"latent": True}, "different latent"),
        ({"version": 2}, "different version"),
        ({"metadata_row_bytes": (16, 16)}, "different metadata_row_bytes"),
        ({"kv_row_bytes": (64, 32)}, "64 bytes in the prefill engine and 32"),
        ({"kv_layers": (0, 1)}, "no buffer for layer 0"),
        ({"kv_layers": ()}, "not both name their layers"),
        ({"kv_layers": (0, 0, 1)}, "other numbers of layers"),
    ],
)
def test_engines_that_do_not_fit(more: dict[str, object], text: str) -> None:
    with pytest.raises(PassportMismatch, match=text):
        route(layout(), layout(**more))


def test_states_need_equal_ranks() -> None:
    states = {"state_kinds": ("mamba",), "state_row_bytes": ((8,),), "state_layers": ((),)}
    with pytest.raises(PassportMismatch, match=r"With states \(mamba\)"):
        route(layout(ranks=2, **states), layout(**states))


def test_buffers_are_paired_by_layer() -> None:
    assert pair_buffers([4, 5, 4, 5], [3, 4, 5, 3, 4, 5], 4, 6) == [(0, 1), (1, 2), (2, 4), (3, 5)]
    assert pair_buffers([], [], 2, 2) == [(0, 0), (1, 1)]
