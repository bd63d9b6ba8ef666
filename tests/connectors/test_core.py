"""What the connector decides, without vLLM: keys that grow, matches, loads, saves, and what the gateway is told."""

from __future__ import annotations

import dataclasses
import gc
import sys
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mooncache.client.keys import split_keys
from mooncache.connectors.vllm.core.book import ANSWER_TTL_S, PoolQuery, RequestBook
from mooncache.connectors.vllm.core.chain import KeyChain
from mooncache.connectors.vllm.core.groups import BlockRange
from mooncache.connectors.vllm.core.idle import FIRST_S, MAX_S, SHARE, IdleWait
from mooncache.connectors.vllm.core.layer_hooks import replays_full_graphs, why_whole_blocks
from mooncache.connectors.vllm.core.question import KEYS_ASKED_MAX
from mooncache.connectors.vllm.core.refusals import PoolRefusal, Uncached
from mooncache.errors import InvalidArgument
from mooncache.kvcache.keys import request_keys
from mooncache.kvcache.leg_hint import CacheOutcome
from mooncache.kvcache.lookup import LookupOutcome
from mooncache.kvcache.passport import Passport

SIZE = 4
PASSPORT = Passport(
    weights_digest="w",
    config_digest="c",
    tokenizer_digest="t",
    engine="e",
    kv_dtype="f",
    kv_layout="l",
    block_tokens=SIZE,
)
SHARDS = [dataclasses.replace(PASSPORT, tp_rank=rank, tp_size=2) for rank in range(2)]


def book(passports: list[Passport] | None = None, **settings: Any) -> RequestBook:
    return RequestBook(passports or [PASSPORT], **settings)


def add(
    to: RequestBook,
    count: int,
    *,
    name: str = "r",
    salt: str = "",
    ask: dict[str, Any] | None = None,
    first: int = 0,
) -> list[int]:
    tokens = list(range(first, first + count))
    params = {"mooncache": ask} if ask is not None else None
    assert to.add(name, tokens, salt=salt, params=params) == ""
    return tokens


def answer(to: RequestBook, present: list[bool], *, name: str = "r", outcome: str = "found") -> None:
    to.answered(name, present, LookupOutcome(outcome).reported(), 0.25, 0.0)


# --- chains ------------------------------------------------------------------------------------------------------


@given(
    begin=st.integers(0, 30),
    steps=st.lists(st.integers(1, 9), max_size=6),
    public=st.integers(0, 40),
    salt=st.sampled_from(["", "s"]),
)
def test_a_chain_that_grew_equals_one_that_was_begun_long(
    begin: int, steps: list[int], public: int, salt: str
) -> None:
    tokens = list(range(100, 200))
    chain = KeyChain.begin(
        SHARDS, tokens[:begin], salt=salt, public_tokens=public if begin else 0, public_salt="p"
    )
    end = begin
    for step in steps:
        end += step
        chain.extend(tokens[len(chain) * SIZE : end])
    # What is public is decided by the prompt; what follows it belongs to the request.
    within = min(public, begin // SIZE * SIZE) if begin else 0
    for shard, passport in enumerate(SHARDS):
        wanted = request_keys(passport, tokens[:end], salt=salt, public_tokens=within, public_salt="p")
        assert chain.packed(BlockRange(0, 0, len(chain)))[shard] == wanted


def test_shards_have_keys_of_their_own_and_a_block_needs_all_of_them() -> None:
    chain = KeyChain.begin(SHARDS, range(3 * SIZE))
    keys = split_keys(chain.interleaved())
    assert len(set(keys)) == 6
    assert keys[2] == chain.key(1, 0)
    assert keys[3] == chain.key(1, 1)
    assert chain.whole([True, True, True, False, True, True]) == bytes((1, 0, 1))
    assert chain.whole([True, True, True]) == bytes((1,))
    assert chain.whole([]) == b""


def test_tokens_that_are_none_have_no_chain() -> None:
    with pytest.raises(InvalidArgument):
        KeyChain.begin([PASSPORT], [-1] * SIZE)
    assert book().add("r", [-1] * SIZE, salt="", params=None) == "tokens"


# --- matches and loads -------------------------------------------------------------------------------------------


def test_the_answer_is_not_known_until_the_pool_said_it() -> None:
    kept = book()
    add(kept, 3 * SIZE + 1)
    first = kept.match("r", 0, 0.0, pool_usable=True)
    assert first.tokens is None
    assert isinstance(first.query, PoolQuery)
    assert (len(first.query.keys), first.query.awaited) == (3 * 32, 0)
    assert kept.pending()
    assert kept.match("r", 0, 0.0, pool_usable=True) == dataclasses.replace(first, query=None)
    answer(kept, [True, True, False])
    assert not kept.pending()
    for _ in range(3):
        assert kept.match("r", 0, 0.0, pool_usable=True).tokens == 2 * SIZE
    assert kept.match("r", SIZE, 0.0, pool_usable=True).tokens == SIZE
    assert kept.match("r", 2 * SIZE, 0.0, pool_usable=True).tokens == 0


def test_blocks_behind_the_local_ones_count_even_when_the_first_are_gone() -> None:
    kept = book()
    add(kept, 4 * SIZE)
    kept.match("r", SIZE, 0.0, pool_usable=True)
    answer(kept, [False, True, True, True])
    assert kept.match("r", SIZE, 0.0, pool_usable=True).tokens == 3 * SIZE
    assert kept.match("r", 0, 0.0, pool_usable=True).tokens == 0


def test_an_old_answer_is_not_believed() -> None:
    kept = book()
    add(kept, 2 * SIZE)
    kept.match("r", 0, 0.0, pool_usable=True)
    answer(kept, [True, True])
    late = kept.match("r", 0, ANSWER_TTL_S + 0.1, pool_usable=True)
    assert late.tokens is None
    assert late.query is not None


def test_nothing_is_asked_when_it_makes_no_sense() -> None:
    kept = book()
    add(kept, SIZE - 1, name="short")
    assert kept.match("short", 0, 0.0, pool_usable=True) == dataclasses.replace(
        kept.match("unknown", 0, 0.0, pool_usable=True)
    )
    add(kept, 2 * SIZE, name="local")
    assert kept.match("local", 2 * SIZE, 0.0, pool_usable=True).query is None
    add(kept, 2 * SIZE, name="absent", ask={})
    assert kept.match("absent", 0, 0.0, pool_usable=False).tokens == 0
    heard = kept.cache_report("absent")
    assert heard is not None
    assert heard.outcome == "pool_absent"
    # a pool that is silent may be back before the blocks are due
    add(kept, 2 * SIZE, name="waits", ask={"wait_tokens": 2 * SIZE, "wait_ms": 1000})
    asked = kept.match("waits", 0, 0.0, pool_usable=False).query
    assert asked is not None
    assert (asked.awaited, asked.deadline_s) == (2, 1.0)
    off = book(refusal=PoolRefusal(Uncached.DISABLED))
    assert off.add("r", [1] * SIZE, salt="", params=None) == "disabled"


def test_only_what_is_not_there_yet_is_awaited() -> None:
    kept = book(SHARDS)
    ask = {"wait_tokens": 3 * SIZE + 2, "wait_ms": 500}
    add(kept, 4 * SIZE, ask=ask)
    found = kept.match("r", SIZE, 10.0, pool_usable=True).query
    assert found is not None
    assert (found.awaited, found.deadline_s) == (3 * 2, 10.5)  # two shards
    add(kept, 4 * SIZE, name="local", ask=ask)
    found = kept.match("local", 3 * SIZE, 10.0, pool_usable=True).query
    assert found is not None
    assert found.awaited == 0


def load(kept: RequestBook, blocks: int, *, name: str = "r", table: range = range(10, 20)) -> Any:
    kept.match(name, 0, 0.0, pool_usable=True)
    answer(kept, [True] * blocks, name=name)
    kept.match(name, 0, 0.0, pool_usable=True)
    return kept.allocated(name, [table], blocks * SIZE)


def test_what_is_loaded_goes_where_the_engine_says() -> None:
    kept = book()
    add(kept, 3 * SIZE, ask={})
    transfer = load(kept, 3)
    assert (transfer.name, transfer.blocks) == ("r", (10, 11, 12))
    assert split_keys(transfer.keys[0]) == [kept._requests["r"].chain.key(i) for i in range(3)]  # type: ignore[union-attr]
    assert kept.is_loading("r")
    assert kept.match("r", 0, 0.0, pool_usable=True).tokens == 0
    assert kept.loaded("r", 3, 99, 0.5) == 0
    heard = kept.cache_report("r")
    assert heard is not None
    assert (heard.outcome, heard.hit_tokens, heard.loaded_bytes) == ("hit", 12, 99)
    assert (heard.waited_ms, heard.load_ms) == (250.0, 500.0)
    assert kept.allocated("r", [range(10)], 0) is None


def test_a_request_whose_load_failed_never_loads_again() -> None:
    kept = book()
    add(kept, 3 * SIZE, ask={})
    load(kept, 3)
    assert kept.loaded("r", 1, 9, 0.1) == 2
    assert kept.match("r", 0, 0.0, pool_usable=True).tokens == 0
    heard = kept.cache_report("r")
    assert heard is not None
    assert (heard.outcome, heard.loaded_tokens, heard.failed_blocks) == ("failed", SIZE, 2)
    save = kept.plan_save("r", list(range(12)), 12, [range(10, 20)], 99)
    assert save is not None
    assert save.blocks == (11, 12)  # computed again, saved again


def test_outcomes() -> None:
    kept = book()
    cases = [
        ([True, True], "found", "hit"),
        ([True, False], "found", "partial"),
        ([False] * 2, "found", "miss"),
    ]
    cases += [
        ([True, False], "timeout", "timeout"),
        ([True, True], "timeout", "hit"),
        ([], "failed", "failed"),
    ]
    for number, (present, outcome, wanted) in enumerate(cases):
        name = f"r{number}"
        add(kept, 2 * SIZE, name=name, ask={})
        kept.match(name, 0, 0.0, pool_usable=True)
        answer(kept, present, name=name, outcome=outcome)
        tokens = kept.match(name, 0, 0.0, pool_usable=True).tokens
        assert tokens is not None
        if tokens:
            kept.allocated(name, [range(1, 9)], tokens)
            kept.loaded(name, tokens // SIZE, 1, 0.0)
        heard = kept.cache_report(name)
        assert heard is not None
        assert heard.outcome == wanted
    add(kept, SIZE, name="silent")
    assert kept.cache_report("silent") is None


# --- saves -------------------------------------------------------------------------------------------------------


def test_complete_blocks_are_saved_once() -> None:
    kept = book()
    tokens = add(kept, 3 * SIZE + 2)
    assert kept.plan_save("r", tokens, SIZE - 1, [range(1, 9)], 99) is None
    first = kept.plan_save("r", tokens, 2 * SIZE + 1, [range(1, 9)], 99)
    assert first is not None
    assert first.blocks == (1, 2)
    assert kept.plan_save("r", tokens, 2 * SIZE + 3, [range(1, 9)], 99) is None
    more = [*tokens, *range(500, 500 + SIZE)]
    second = kept.plan_save("r", more, len(more) - 1, [range(1, 9)], 99)
    assert second is not None
    assert second.blocks == (3, 4)
    kept.check()
    add(kept, 3 * SIZE + 2, name="same")
    assert kept.plan_save("same", tokens, len(tokens), [range(1, 9)], 99) is None  # under way
    kept.saved(first.name, [0])
    kept.saved(second.name, [])
    kept.check()
    add(kept, 3 * SIZE + 2, name="again")
    third = kept.plan_save("again", tokens, len(tokens), [range(1, 9)], 99)
    assert third is not None
    assert third.blocks == (2, 3)  # the first is there, the others were lost
    assert kept._saves.under_way == 1


def test_a_prefill_leg_tells_how_much_of_its_prompt_the_pool_gets() -> None:
    kept = book()

    def held(name: str) -> int:
        heard = kept.cache_report(name)
        assert heard is not None
        return heard.held_tokens

    tokens = add(kept, 4 * SIZE + 1, ask={"role": "prefill"})
    assert held("r") == 0
    save = kept.plan_save("r", tokens, len(tokens), [range(1, 9)], 3)
    assert save is not None and held("r") == 3 * SIZE, "the last one has no room yet"
    rest = kept.plan_save("r", tokens, len(tokens), [range(1, 9)], 3)
    assert rest is not None and held("r") == 4 * SIZE
    kept.saved(save.name, [0, 2])
    assert held("r") == SIZE, "one in the middle was not stored"
    kept.saved(rest.name, [0])
    assert held("r") == SIZE
    add(kept, 3 * SIZE, name="known", ask={"role": "prefill"}, first=50)
    kept.match("known", 0, 0.0, pool_usable=True)
    answer(kept, [True, True, True], name="known")
    assert kept.plan_save("known", list(range(50, 50 + 3 * SIZE)), 3 * SIZE, [range(1, 9)], 9) is None
    assert held("known") == 3 * SIZE, "the pool has them"
    null = book()
    more = add(null, 2 * SIZE, ask={"role": "prefill"})
    null.plan_save("r", more, 2 * SIZE, [[0, 5]], 9)  # 0 is the engine's empty block
    heard = null.cache_report("r")
    assert heard is not None and heard.held_tokens == 0


def test_blocks_that_the_pool_holds_are_not_saved() -> None:
    kept = book()
    tokens = add(kept, 3 * SIZE)
    kept.match("r", 0, 0.0, pool_usable=True)
    answer(kept, [True, False, True])
    save = kept.plan_save("r", tokens, 3 * SIZE, [range(1, 9)], 99)
    assert save is not None
    assert save.blocks == (2,)


def test_interleaving_is_the_same_for_any_number_of_shards() -> None:
    for count in (1, 2, 3, 8):
        shards = [dataclasses.replace(PASSPORT, tp_rank=rank, tp_size=count) for rank in range(count)]
        chain = KeyChain.begin(shards, range(5 * SIZE))
        wanted = [chain.key(block, shard) for block in range(5) for shard in range(count)]
        assert split_keys(chain.interleaved()) == wanted
        for missing in range(5 * count):
            present = [at != missing for at in range(5 * count)]
            assert list(chain.whole(present)) == [block != missing // count for block in range(5)]


def test_a_longer_prompt_takes_no_more_steps_of_python() -> None:
    """vLLM's scheduler waits meanwhile: 128k tokens on 8 ranks have 65,536 keys."""

    def steps(blocks: int) -> int:
        shards = [dataclasses.replace(PASSPORT, tp_rank=rank, tp_size=8) for rank in range(8)]
        kept, tokens, count = book(shards), list(range(SIZE * blocks)), 0

        def trace(*_: Any) -> Any:
            nonlocal count
            count += 1
            return trace

        present = (True,) * (8 * blocks - 3) + (False,) * 3
        gc.disable()  # hypothesis has a callback at each collection, whose steps would count
        sys.settrace(trace)
        try:
            kept.add("r", tokens, salt="s", params=None)
            kept.match("r", 0, 0.0, pool_usable=True)
            kept.answered("r", present, CacheOutcome.UNKNOWN, 0.0, 0.0)
            found = kept.match("r", 0, 0.0, pool_usable=True)
        finally:
            sys.settrace(None)
            gc.enable()
        assert found.tokens == SIZE * (blocks - 1)
        return count

    steps(10)  # what is remembered between calls
    assert steps(2000) == steps(20)


def test_a_prompt_with_more_keys_than_one_question_takes_is_asked_about_from_its_beginning() -> None:
    kept = book(SHARDS)
    tokens = list(range(SIZE * (KEYS_ASKED_MAX // 2 + 3)))
    kept.add("r", tokens, salt="", params=None)
    asked = kept.match("r", 0, 0.0, pool_usable=True).query
    assert asked is not None
    assert len(asked.keys) == 32 * KEYS_ASKED_MAX
    answer(kept, [True] * KEYS_ASKED_MAX)
    assert kept.match("r", 0, 0.0, pool_usable=True).tokens == SIZE * (KEYS_ASKED_MAX // 2)


def test_what_was_saved_after_the_pools_answer_is_not_saved_again() -> None:
    kept = book()
    tokens = add(kept, SIZE)
    kept.match("r", 0, 0.0, pool_usable=True)
    answer(kept, [False])
    add(kept, SIZE, name="twin")
    save = kept.plan_save("twin", tokens, SIZE, [range(1, 9)], 99)
    assert save is not None
    kept.saved(save.name, [0])
    assert kept.plan_save("r", tokens, SIZE, [range(1, 9)], 99) is None


def test_an_answer_corrects_what_was_believed() -> None:
    kept = book()
    tokens = add(kept, SIZE)
    save = kept.plan_save("r", tokens, SIZE, [range(1, 9)], 99)
    assert save is not None
    kept.saved(save.name, [0])
    add(kept, SIZE + 1, name="next")
    kept.match("next", 0, 0.0, pool_usable=True)
    answer(kept, [False], name="next")
    assert kept.plan_save("next", tokens, SIZE, [range(1, 9)], 99) is not None
    add(kept, SIZE, name="third")
    assert kept.plan_save("third", tokens, SIZE, [range(1, 9)], 99) is None  # still under way


def test_a_new_generation_of_keys_takes_nothing_from_the_former_one() -> None:
    kept = book()
    tokens = add(kept, 2 * SIZE)
    saved = kept.plan_save("r", tokens, SIZE, [range(1, 9)], 99)
    assert saved is not None
    kept.saved(saved.name, [0])
    add(kept, 2 * SIZE, name="waits")
    kept.match("waits", 0, 0.0, pool_usable=True)
    kept.renew([dataclasses.replace(PASSPORT, weights_digest="others")])
    # What ran is mixed: it loads nothing and saves nothing, also what comes in late.
    answer(kept, [True, True], name="waits")
    assert kept.match("waits", 0, 1.0, pool_usable=True).tokens == 0
    for name in ("r", "waits"):
        assert not kept.due(name, 2 * SIZE, 2 * SIZE)
        assert kept.plan_save(name, tokens, 2 * SIZE, [range(1, 9)], 99) is None
    add(kept, 2 * SIZE, name="new")
    again = kept.plan_save("new", tokens, 2 * SIZE, [range(1, 9)], 99)
    assert again is not None
    assert len(again.blocks) == 2
    assert again.keys[0][:32] != saved.keys[0]
    kept.check()


def test_limits_of_saves() -> None:
    kept = book(save_decode_blocks=False)
    tokens = add(kept, 2 * SIZE)
    longer = [*tokens, *range(900, 900 + 2 * SIZE)]
    one = kept.plan_save("r", longer, len(longer), [range(1, 9)], 1)
    two = kept.plan_save("r", longer, len(longer), [range(1, 9)], 9)
    assert one is not None
    assert two is not None
    assert (one.blocks, two.blocks) == ((1,), (2,))
    assert kept.plan_save("r", longer, len(longer), [range(1, 9)], 9) is None
    null = book()
    add(null, 2 * SIZE)
    save = null.plan_save("r", tokens, 2 * SIZE, [[0, 5]], 9)  # 0 is the engine's empty block
    assert save is not None
    assert save.blocks == (5,)


def test_a_request_that_loads_saves_nothing() -> None:
    kept = book()
    tokens = add(kept, 2 * SIZE)
    load(kept, 2)
    assert kept.plan_save("r", tokens, 2 * SIZE, [range(1, 9)], 99) is None
    kept.forget("r")
    assert "r" not in kept
    assert kept.loaded("r", 2, 1, 0.0) == 0


def test_after_a_preemption_nothing_is_told_twice() -> None:
    kept = book()
    tokens = add(kept, 2 * SIZE, ask={})
    load(kept, 1)
    kept.loaded("r", 1, 1, 0.0)
    kept.plan_save("r", tokens, 2 * SIZE, [range(1, 9)], 99)
    asked = kept.match("r", SIZE, 5.0, pool_usable=True).query
    assert asked is not None
    assert asked.awaited == 0
    kept.answered("r", [True, True], "found", 0.0, 5.0)
    kept.match("r", SIZE, 5.0, pool_usable=True)
    kept.allocated("r", [range(10)], SIZE)
    kept.loaded("r", 1, 1, 0.0)
    heard = kept.cache_report("r")
    assert heard is not None
    assert (heard.local_tokens, heard.loaded_tokens, heard.hit_tokens) == (0, SIZE, SIZE)


# --- waiting -----------------------------------------------------------------------------------------------------


def test_an_empty_step_waits_a_small_share_of_what_was_waited() -> None:
    idle = IdleWait()
    assert idle.next_s(10.0, waiting=False) == 0
    assert idle.next_s(11.0, waiting=True) == FIRST_S
    assert idle.next_s(11.5, waiting=True) == pytest.approx(0.5 * SHARE)
    assert idle.next_s(99.0, waiting=True) == MAX_S
    assert idle.next_s(99.1, waiting=False) == 0  # a step that computes: from here anew
    assert idle.next_s(99.2, waiting=True) == FIRST_S


# --- layers --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("wanted", "full_graphs", "reason"),
    [
        (True, False, ""),
        (False, False, "layerwise is false"),
        (True, True, "no hook of a layer"),
    ],
)
def test_blocks_are_saved_layer_by_layer_where_the_hooks_run(
    wanted: bool, full_graphs: bool, reason: str
) -> None:
    found = why_whole_blocks(wanted=wanted, full_graphs=full_graphs)
    assert found == reason if not reason else reason in found


def test_graphs_are_read_from_the_configuration_of_vllm() -> None:
    def config(full: bool | None) -> Any:
        mode = None if full is None else SimpleNamespace(has_full_cudagraphs=lambda: full)
        return SimpleNamespace(compilation_config=SimpleNamespace(cudagraph_mode=mode))

    assert [replays_full_graphs(config(full)) for full in (True, False, None)] == [True, False, False]
    assert not replays_full_graphs(object())
