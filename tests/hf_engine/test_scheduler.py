"""The scheduler without a model: long random histories in which nothing leaks and everything ends."""

from __future__ import annotations

import random

import pytest

from mooncache.hf_engine.core.blocks import BlockPool
from mooncache.hf_engine.core.scheduler import BatchScheduler
from mooncache.hf_engine.core.sequence import Sampling, Sequence, State
from mooncache.kvcache.leg_hint import LegHint
from mooncache.kvcache.passport import Passport

BLOCK = 4
PASSPORT = Passport(
    weights_digest="w",
    config_digest="c",
    tokenizer_digest="t",
    engine="test",
    kv_dtype="x",
    kv_layout="x",
    block_tokens=BLOCK,
)


def sequence(tokens: list[int], max_tokens: int = 4, **more: object) -> Sequence:
    made = Sequence(
        tokens=tokens,
        sampling=Sampling(max_tokens=max_tokens),
        passport=PASSPORT,
        block_tokens=BLOCK,
        **more,  # type: ignore[arg-type]
    )
    made.state = State.WAITING
    return made


def scheduler(blocks: int = 32, batch_max: int = 4, chunk_tokens: int = 8) -> BatchScheduler:
    return BatchScheduler(BlockPool(blocks), batch_max=batch_max, chunk_tokens=chunk_tokens)


def test_prompts_share_a_budget_and_others_go_on_decoding() -> None:
    core = scheduler()
    short, long, late = sequence([1, 2]), sequence(list(range(20))), sequence(list(range(50, 60)))
    core.add(short)
    core.admit()
    (work,) = core.plan()
    assert (work.start, work.count, work.chooses) == (0, 2, True)
    core.advance(work)
    short.tokens.append(9)
    core.add(long)
    core.add(late)
    core.admit()
    assert [(w.sequence, w.start, w.count) for w in core.plan()] == [(short, 2, 1), (long, 0, 8)]


def test_lookups_under_way_are_passed_over_and_order_is_kept() -> None:
    core = scheduler(batch_max=2)
    slow, first, second, third = (sequence([n, n + 1, n + 2]) for n in range(4))
    slow.state = State.LOOKUP
    for one in (slow, first, second, third):
        core.add(one)
    assert core.admit() == [first, second]
    slow.state = State.WAITING
    core.finish(first)
    assert core.admit() == [slow]


def test_a_large_prompt_is_not_overtaken() -> None:
    core = scheduler(blocks=10)
    holder, large, small = sequence(list(range(20))), sequence(list(range(40, 76))), sequence([1])
    for one in (holder, large, small):
        core.add(one)
    assert core.admit() == [holder], "the small one would fit and has to wait its turn"
    core.finish(holder)
    assert core.admit() == [large]


def test_who_waits_is_ordered_by_priority_and_then_by_arrival() -> None:
    core = scheduler(batch_max=1)
    running = sequence([1, 2], priority=9)
    core.add(running)
    assert core.admit() == [running]
    places = [5, 3, 5, 4, 3]
    waiting = [sequence([n, n + 1], priority=place) for n, place in enumerate(places)]
    for one in waiting:
        core.add(one)
    started = []
    while core.running:
        core.finish(core.running[0])
        started += core.admit()
    assert [waiting.index(one) for one in started] == [1, 4, 3, 0, 2]
    core.check()


def test_blocks_are_taken_from_the_last_by_priority_who_is_not_passed_again() -> None:
    core = scheduler(blocks=5, chunk_tokens=64)
    offline, online = (sequence(list(range(n, n + 6)), priority=n) for n in (20, 10))
    for one in (online, offline):
        core.add(one)
        assert core.admit() == [one]
    for work in core.plan():
        core.advance(work)
    online.tokens += range(7)
    core.plan()
    assert core.running == [online]
    core.add(sequence([1], priority=15))
    assert core.waiting[0] is offline, "it has run before"
    core.check()


def test_loads_cover_what_the_pool_has_beyond_the_local_blocks() -> None:
    core = scheduler()
    first = sequence(list(range(8)))
    core.add(first)
    core.admit()
    core.advance(core.plan()[0])
    core.finish(first)
    again = sequence(list(range(24)), present=(True, True, True, True, False, True))
    core.add(again)
    core.admit()
    assert again.state is State.LOADING and again.computed == 8 and again.load == range(2, 4)
    assert core.plan() == [], "nothing runs while it loads"
    core.loaded(again, 1)
    assert again.state is State.RUNNING and again.computed == 12
    assert core.plan()[0].start == 12
    core.check()


def test_awaited_blocks_leave_one_to_compute() -> None:
    assert sequence(list(range(16)), hint=LegHint(wait_tokens=16)).awaited_blocks == 3
    assert sequence(list(range(17)), hint=LegHint(wait_tokens=16)).awaited_blocks == 4


@pytest.mark.parametrize("seed", range(30))
def test_random_histories(seed: int) -> None:
    """Arrivals, failing loads, aborts, tight memory: every sequence ends and every block comes back."""
    source = random.Random(seed)
    core = scheduler(blocks=source.randint(12, 40), batch_max=source.randint(1, 6))
    heads = [[source.randrange(5) for _ in range(16)] for _ in range(3)]
    todo = []
    for _ in range(25):
        head = source.choice(heads)[: source.randrange(17)]
        tokens = head + [source.randrange(100) for _ in range(source.randint(1, 12))]
        todo.append(sequence(tokens, source.randint(1, 12), present=(True,) * source.randrange(5)))
    alive: list[Sequence] = []
    for _ in range(5000):
        if todo and source.random() < 0.3:
            alive.append(todo.pop())
            core.add(alive[-1])
        core.admit()
        for one in alive:
            if one.state is State.LOADING and source.random() < 0.5:
                core.loaded(one, source.randint(0, len(one.load)))
        if alive and source.random() < 0.02:
            victim = source.choice(alive)
            if victim.state is not State.LOADING:
                core.finish(victim)
        for work in core.plan():
            assert work.sequence.state is State.RUNNING
            core.advance(work)
            if work.chooses:
                work.sequence.tokens.append(source.randrange(100))
                if work.sequence.generated >= work.sequence.sampling.max_tokens:
                    core.finish(work.sequence)
        core.check()
        alive = [one for one in alive if one.state is not State.DONE]
        if not todo and not alive:
            break
    assert not todo and not alive, f"seed {seed}: {len(alive)} did not end"
    assert core.blocks.free_count == core.blocks.count


def test_a_promise_is_loaded_although_it_is_not_there_yet() -> None:
    core = scheduler()
    core.blocks_to_load = lambda _, found: 0  # a promise was weighed before it was made
    one = sequence(list(range(18)))
    one.present, one.promise_end = (True, False, False), 3
    core.add(one)
    assert core.admit() == [one]
    assert (one.state, one.load) == (State.LOADING, range(3))
    core.loaded(one, 2)
    one.learned(range(3), 2)
    assert one.present == (True, True, False) and one.computed == 2 * BLOCK
    core.check()
    here = sequence(list(range(18)))  # its first two blocks are in the engine's own cache
    here.present, here.promise_end = (True, True), 2
    core.add(here)
    core.admit()
    assert (here.state, here.promise_end, here.load) == (State.RUNNING, 0, range(2, 2))
