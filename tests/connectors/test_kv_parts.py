"""Blocks in parts by heads and layers: every size of engine writes what every other one reads."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import pytest

from mooncache.connectors.vllm.core.kv_parts import (
    EngineShape,
    RankParts,
    joined,
    parts_of_rank,
    passports_of,
    weights_named,
)
from mooncache.connectors.vllm.core.refusals import PoolRefusal
from mooncache.errors import ConfigInvalid, InvalidArgument
from mooncache.kvcache.core.break_even import Pace
from mooncache.kvcache.keys import passport_to_json
from mooncache.kvcache.passport import Passport
from mooncache.kvcache.transfers import LoadReport, MoveFailure, SaveReport, TransferJob
from tests.connectors.harness import BLOCK_TOKENS, Make, expected, prompt
from tests.kvcache.faulty import FaultyPool

pytest.importorskip("vllm", reason="vLLM is not installed (scripts/install_vllm.sh)")
pytestmark = pytest.mark.filterwarnings("ignore")  # vLLM's own

LAYERS, HEADS, BLOCKS, TOKENS, CONTENT = 8, 8, 3, 4, 6
# As vLLM orders layers, blocks, heads, tokens and content in memory.
ORDERS = {
    "LBHNC": (0, 1, 2, 3, 4),
    "LBNHC": (0, 1, 3, 2, 4),
    "LHBNC": (0, 2, 1, 3, 4),
    "BLHNC": (1, 0, 2, 3, 4),
    "BLNHC": (1, 0, 3, 2, 4),
    "BHLNC": (1, 2, 0, 3, 4),
}
PASSPORT = Passport(
    weights_digest="w",
    config_digest="c",
    tokenizer_digest="t",
    engine="e",
    kv_dtype="float32/auto",
    kv_layout="l",
    block_tokens=TOKENS,
)
Stored = dict[tuple[int, int], tuple[str, bytes]]


class Engine:
    """The KV tensors of all ranks of an engine, as vLLM allocates them."""

    def __init__(self, order: str, tp_size: int, pp_size: int, values: Any, *, heads: int = HEADS) -> None:
        """`values`: what each layer, block, head, token and content is; None: zeros."""
        import torch

        self.ranks: list[tuple[RankParts, dict[str, Any]]] = []
        each, copies = max(1, heads // tp_size), max(1, tp_size // heads)
        for stage, rank in itertools.product(range(pp_size), range(tp_size)):
            own = range(stage * LAYERS // pp_size, (stage + 1) * LAYERS // pp_size)
            first = rank // copies if copies > 1 else rank * each
            sizes = (len(own), BLOCKS, each, TOKENS, CONTENT)
            permutation = ORDERS[order]
            memory = torch.zeros([sizes[at] for at in permutation])
            logical = memory.permute([permutation.index(at) for at in range(5)])
            if values is not None:
                logical.copy_(values[own.start : own.stop, :, first : first + each])
            tensors = {f"model.layers.{layer}.attn": logical[at] for at, layer in enumerate(own)}
            shape = EngineShape(heads, each, rank, tp_size, pp_size, tuple(tensors), LAYERS)
            self.ranks.append((parts_of_rank(shape, 8, 4), tensors))

    def _memories(self) -> Any:
        from mooncache.connectors.vllm.part_memory import part_layout, tensors_of
        from mooncache.kvcache.tensors import block_memory

        for parts, tensors in self.ranks:
            for number, part in zip(parts.numbers, parts.own, strict=True):
                own = tensors_of(part, tensors)
                layout = ",".join(part_layout(tensor).describe(BLOCKS) for tensor in own.values())
                yield parts, number, layout, block_memory(list(own.values()), BLOCKS)

    def save(self) -> Stored:
        """Each part of each block, by its number, with the description of its layout."""
        stored: Stored = {}
        for parts, number, layout, memory in self._memories():
            if parts.writes:
                for block in range(BLOCKS):
                    assert (number, block) not in stored, "two ranks write the same"
                    stored[number, block] = (layout, b"".join(map(bytes, memory.slices(block))))
        return stored

    def load(self, stored: Stored) -> None:
        for _, number, layout, memory in self._memories():
            for block in range(BLOCKS):
                described, data = stored[number, block]
                assert described == layout, "the passports would differ"
                at = 0
                for piece in memory.slices(block):
                    piece[:] = data[at : at + len(piece)]
                    at += len(piece)
                assert at == len(data)


def _values(heads: int = HEADS) -> Any:
    import torch

    count = LAYERS * BLOCKS * heads * TOKENS * CONTENT
    return torch.arange(1, count + 1, dtype=torch.float32).view(LAYERS, BLOCKS, heads, TOKENS, CONTENT)


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("heads", [8, 2, 1])
def test_every_size_reads_what_every_size_wrote(order: str, heads: int) -> None:
    import torch

    sizes = list(itertools.product((1, 2, 4, 8), (1, 2, 4)))
    stored = [Engine(order, *size, _values(heads), heads=heads).save() for size in sizes]
    assert all(one == stored[0] for one in stored), "the bytes do not depend on the number of ranks"
    assert len(stored[0]) == heads * 4 * BLOCKS
    for size in sizes:
        reader, wanted = (
            Engine(order, *size, None, heads=heads),
            Engine(order, *size, _values(heads), heads=heads),
        )
        reader.load(stored[0])
        for (_, read), (_, right) in zip(reader.ranks, wanted.ranks, strict=True):
            assert all(torch.equal(read[name], right[name]) for name in right)


def test_parts_of_one_head_are_shared_whatever_the_order_of_heads_and_tokens() -> None:
    """A part of one head is the same bytes with heads before tokens and behind them."""
    by_order = {order: Engine(order, 1, 1, _values()).save() for order in ORDERS}
    assert by_order["LBHNC"] == by_order["LBNHC"] == by_order["BLNHC"]


def test_a_layout_of_two_heads_names_the_order_of_its_bytes() -> None:
    import torch

    from mooncache.connectors.vllm.part_memory import part_layout

    before = part_layout(torch.zeros(BLOCKS, 2, TOKENS, CONTENT)).describe(BLOCKS)
    behind = part_layout(torch.zeros(BLOCKS, TOKENS, 2, CONTENT).permute(0, 2, 1, 3)).describe(BLOCKS)
    assert before != behind


# --- which parts -------------------------------------------------------------------------------------------------


def _shape(**more: Any) -> EngineShape:
    names = tuple(f"model.layers.{layer}.attn" for layer in range(LAYERS))
    found = {"heads_total": 8, "rank_heads": 4, "tp_rank": 0, "tp_size": 2, "pp_size": 1, "layers": names}
    return EngineShape(**{**found, "layers_total": LAYERS, **more})


def test_ranks_hold_their_heads_and_the_first_of_equal_ones_writes() -> None:
    second = parts_of_rank(_shape(tp_rank=1), 4, 1)
    assert second.numbers == (2, 3)
    assert [(part.first_head, part.heads) for part in second.own] == [(0, 2), (2, 2)]
    copies = [
        parts_of_rank(_shape(heads_total=2, rank_heads=1, tp_size=8, tp_rank=rank), 8, 1) for rank in range(8)
    ]
    assert [parts.numbers for parts in copies] == [(0,)] * 4 + [(1,)] * 4
    assert [parts.writes for parts in copies] == [True, False, False, False] * 2
    assert copies[0].head_groups == 2, "there are no more groups than heads"
    latent = [parts_of_rank(_shape(heads_total=1, rank_heads=1, tp_rank=rank), 8, 1) for rank in range(2)]
    assert [(parts.numbers, parts.writes) for parts in latent] == [((0,), True), ((0,), False)]


def test_a_stage_of_a_pipeline_holds_its_groups_of_layers() -> None:
    names = tuple(f"model.layers.{layer}.attn" for layer in range(4, 8))
    parts = parts_of_rank(_shape(pp_size=2, layers=names, tp_rank=1), 2, 4)
    assert (parts.numbers, parts.shares) == ((5, 7), 4)
    assert [part.layers for part in parts.own] == [names[:2], names[2:]]


@pytest.mark.parametrize(
    ("shape", "head_groups", "layer_groups", "why"),
    [
        (_shape(heads_total=6, rank_heads=3), 4, 1, "do not make 4 equal groups"),
        (_shape(tp_size=8, rank_heads=1), 4, 1, "multiple of the ranks"),
        (_shape(rank_heads=8, tp_size=2), 8, 1, "A rank of 2 has 8 heads"),
        (_shape(heads_total=6, rank_heads=1, tp_size=4), 6, 1, "not spread evenly"),
        (_shape(), 8, 3, "do not make 3 equal groups"),
        (_shape(pp_size=2, layers=("model.layers.0.attn",)), 8, 2, "a group of 4"),
        (_shape(pp_size=2, layers=("model.layers.0.attn",)), 8, 1, "a group of 8"),
        (_shape(layers=("attn",)), 8, 2, "has no number"),
        (_shape(layers=("model.layers.0.attn.1",)), 8, 2, "has no number of its own"),
        (_shape(layers=(*_shape().layers, "draft.layers.0.attn")), 8, 2, "the same number"),
    ],
)
def test_what_cannot_be_shared_is_refused_with_its_reason(
    shape: EngineShape, head_groups: int, layer_groups: int, why: str
) -> None:
    with pytest.raises(InvalidArgument, match=why):
        parts_of_rank(shape, head_groups, layer_groups)


def test_layer_groups_need_head_groups() -> None:
    from mooncache.connectors.vllm.settings import read_settings

    with pytest.raises(ConfigInvalid, match="head_groups"):
        read_settings({"mooncache.layer_groups": 2})


def test_the_passports_of_all_parts_are_those_of_the_ranks_in_their_order() -> None:
    own = [dataclasses.replace(PASSPORT, tp_rank=rank, tp_size=4) for rank in range(4)]
    assert (
        joined([own[2:], own[:2]]) == joined([own]) == joined([[one] for one in own for _ in range(2)]) == own
    )
    with pytest.raises(InvalidArgument, match="3 of 4 parts"):
        joined([own[:3]])
    with pytest.raises(InvalidArgument, match="describe them differently"):
        joined([own, [dataclasses.replace(own[1], kv_layout="other")]])
    texts = [[passport_to_json(one)] for one in own[1:]]
    assert isinstance(passports_of(texts, in_parts=True), PoolRefusal)
    assert passports_of(texts, in_parts=False) == own[1:]


def test_weights_enter_keys_when_the_files_do_not_say_what_they_are() -> None:
    assert weights_named(["a", "b"], ("a", "b")) == ()
    assert weights_named(["a", "b"], ("a", "c")) == ("a", "c")
    assert weights_named(["", "b"], ("", "b")) == ("", "b")
    assert weights_named([], ()) == ()


# --- jobs --------------------------------------------------------------------------------------------------------


def test_jobs_name_the_parts_of_one_block_together() -> None:
    parts = parts_of_rank(_shape(tp_rank=1), 4, 1)
    keys = [bytes([part]) * 32 + bytes([part + 100]) * 32 for part in range(4)]
    job = TransferJob("r", (), (7, 9), pace=Pace(1.0, 0.4), awaited=(1,))
    made = parts.spread(job, keys, lambda at, block: at * 1000 + block)
    assert made.keys == tuple(bytes([part]) * 32 for part in (2, 3, 102, 103))
    assert made.blocks == (7, 1007, 9, 1009)
    assert made.awaited == (2, 3)
    assert made.pace == Pace(1.0, 0.2)
    loaded = parts.loaded(LoadReport("r", made.blocks, 3, 12, 0.5, MoveFailure.MISSING))
    assert (loaded.loaded, loaded.blocks, loaded.reason) == (1, (7, 9), MoveFailure.MISSING)
    saved = parts.saved(SaveReport("r", (0, 2, 3), 1, 8, 0.5, {MoveFailure.FULL: 1}))
    assert (saved.stored, saved.present, saved.lost) == ((1,), 0, {MoveFailure.FULL: 1})


# --- the connector under vLLM's scheduler ------------------------------------------------------------------------


def test_a_prefix_ends_where_a_part_is_missing(make: Make, faulty: FaultyPool) -> None:
    import torch

    tokens, extra = (
        prompt(81, 5 * BLOCK_TOKENS + 3),
        {"mooncache.head_groups": 2, "mooncache.layer_groups": 2},
    )
    first = make(extra)
    first.add("r", tokens)
    first.run()
    assert len(faulty.blocks) == 5 * 4, "two groups of heads, two of layers"
    assert len({len(data) for data in faulty.blocks.values()}) == 1
    second = make(extra)
    request = second.add("r", tokens)
    second.run_until(lambda: request.num_computed_tokens >= 5 * BLOCK_TOKENS)
    table = second.scheduler.kv_cache_manager.get_block_ids("r")[0][:5]
    second.run()
    assert second.outputs["r"] == first.outputs["r"] == expected(tokens, 4)
    assert (second.counted["hit_tokens"], second.counted["loaded_blocks"]) == (5 * BLOCK_TOKENS, 5)
    assert all(torch.equal(tensor[table, 0], tensor[table, 1]) for tensor in second.tensors.values())
    saved = list(faulty.blocks)
    del faulty.blocks[saved[2 * 4 + 3]]
    third = make(extra)
    third.add("r", tokens)
    third.run()
    assert third.outputs["r"] == expected(tokens, 4)
    assert third.counted["hit_tokens"] == 2 * BLOCK_TOKENS
    assert first.leaked_blocks == second.leaked_blocks == third.leaked_blocks == 0
    by_rank = make()
    by_rank.add("r", tokens)
    by_rank.run()
    assert "hit_tokens" not in by_rank.counted


def test_an_engine_whose_kv_has_no_heads_of_its_own_type_says_why(make: Make, faulty: FaultyPool) -> None:
    import torch

    def halves(tensors: dict[str, Any]) -> dict[str, Any]:
        return {name: tensor.view(torch.float8_e4m3fn) for name, tensor in tensors.items()}

    engine = make({"mooncache.head_groups": 2}, shown=halves)
    engine.add("r", prompt(82, 70), ask={"v": 1, "role": "both"})
    engine.run()
    assert engine.outputs["r"] == expected(prompt(82, 70), 4)
    assert not faulty.blocks
    assert engine.reported("r")["reason"].startswith("head_groups: ")
