"""The small engine: a prompt that another engine is computing is loaded as its blocks come, with the same tokens."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest

from mooncache.hf_engine.core.sequence import State
from mooncache.kvcache.core.streaming import WaitPlace
from mooncache.kvcache.leg_hint import LegHint, LegRole
from tests.conditions import wait_until
from tests.hf_engine.conftest import BLOCK, WAIT_S, Lab, prompt
from tests.hf_engine.test_pool import figure, keys_of

Connect = Callable[[], Any]
BLOCKS = 12
AWAITS = LegHint(role=LegRole.DECODE, wait_tokens=BLOCKS * BLOCK, wait_ms=60_000)


@pytest.fixture
def decode(make_lab: Callable[..., Lab], connect: Connect) -> Lab:
    return make_lab(connect, connector__stream="on")


def test_blocks_are_loaded_as_another_engine_commits_them(
    make_lab: Callable[..., Lab], connect: Connect, decode: Lab
) -> None:
    prefill, alone = make_lab(connect, hf__prefill_chunk_tokens=2 * BLOCK), make_lab()
    one = prompt(200, 901)
    waiting = decode.submit(one, hint=AWAITS)[0]
    wait_until(lambda: waiting.state is State.LOADING, "it has its blocks and waits for their bytes")
    prefill.run(one, tokens=1, hint=LegHint(role=LegRole.PREFILL))
    assert waiting.sink.ended.wait(WAIT_S)
    reported = waiting.sink.cache
    assert (reported.loaded_tokens, reported.outcome) == (BLOCKS * BLOCK, "hit")
    assert reported.waited_ms > 0 and 0 <= reported.hidden_ms <= reported.load_ms
    assert [waiting.sink.tokens] == alone.tokens(one)
    assert figure(decode, "awaiting_requests_total", place=WaitPlace.STREAMED) == 1
    decode.settled()
    prefill.settled()


@pytest.mark.parametrize("came", [0, 5])
def test_what_does_not_come_is_computed(
    make_lab: Callable[..., Lab], connect: Connect, decode: Lab, came: int
) -> None:
    first, alone = make_lab(connect), make_lab()
    one = prompt(200, 902 + came)
    first.run(one[: came * BLOCK + 1], tokens=1)
    first.settled()
    waiting = decode.submit(one, hint=AWAITS)[0]
    wait_until(lambda: waiting.state is State.LOADING, "it waits")
    with connect() as client:
        client.give_up(keys_of(decode, one)[came:], timeout_s=5.0)
        assert waiting.sink.ended.wait(WAIT_S / 2)
        reported = waiting.sink.cache
        assert (reported.loaded_tokens, reported.outcome) == (came * BLOCK, "timeout")
        assert reported.failed_blocks == 0
        assert [waiting.sink.tokens] == alone.tokens(one)
        decode.settled()
        assert client.match(keys_of(decode, one)).leading_blocks == BLOCKS, "others find what was computed"


def test_at_the_time_limit_what_is_there_is_used(
    make_lab: Callable[..., Lab], connect: Connect, decode: Lab
) -> None:
    first, alone = make_lab(connect), make_lab()
    one = prompt(200, 911)
    first.run(one[: 3 * BLOCK + 1], tokens=1)
    first.settled()
    hint = LegHint(role=LegRole.DECODE, wait_tokens=BLOCKS * BLOCK, wait_ms=50)
    result = decode.run(one, hint=hint)[0]
    assert (result.cache.loaded_tokens, result.cache.outcome) == (3 * BLOCK, "timeout")
    assert result.cache.waited_ms >= 50
    assert [result.tokens] == alone.tokens(one)
    decode.settled()


def test_others_run_while_one_streams_and_an_abort_frees_its_blocks(decode: Lab, connect: Connect) -> None:
    waiting = decode.submit(prompt(200, 912), hint=AWAITS)[0]
    wait_until(lambda: waiting.state is State.LOADING, "it waits")
    assert len(decode.tokens(prompt(50, 913))[0]) == 12
    assert waiting.state is State.LOADING
    decode.engine.abort([waiting])
    assert waiting.sink.ended.wait(WAIT_S) and waiting.sink.finish == "abort"
    decode.settled()


def test_by_itself_an_engine_streams_what_gains_and_leaves_memory_to_others(
    make_lab: Callable[..., Lab], connect: Connect
) -> None:
    lab = make_lab(connect, hf__batch_max=2)
    known = lab.engine.streaming
    assert known is not None
    first = lab.submit(prompt(200, 914), hint=AWAITS)[0]
    lab.on_engine(lambda: None)
    assert first.state is State.LOOKUP, "it does not know yet how long its loads take"

    def teach() -> None:
        for _ in range(3):
            known.loaded(BLOCKS, 0.05)

    lab.on_engine(teach)
    second = lab.submit(prompt(200, 915), hint=AWAITS)[0]
    wait_until(lambda: second.state is State.LOADING, "it streams")
    third = lab.submit(prompt(200, 916), hint=AWAITS)[0]
    lab.on_engine(lambda: None)
    assert third.state is State.LOOKUP, "the last place of the batch is for others"
    for place in (WaitPlace.SPEED_UNKNOWN, WaitPlace.STREAMED, WaitPlace.MEMORY):
        assert figure(lab, "awaiting_requests_total", place=place) == 1
    lab.engine.abort([first, second, third])
    for sequence in (first, second, third):
        assert sequence.sink.ended.wait(WAIT_S)
    lab.settled()


def test_many_that_stream_at_once(make_lab: Callable[..., Lab], connect: Connect) -> None:
    """Waits of sixteen requests share the engine's threads, and each gets its own blocks."""
    prefill, alone = make_lab(connect), make_lab()
    decode = make_lab(connect, connector__stream="on", hf__batch_max=32)
    threads = threading.active_count()
    prompts = [prompt(60 + number, 920 + number) for number in range(16)]
    waiting = [decode.submit(one, hint=LegHint(wait_tokens=len(one), wait_ms=60_000))[0] for one in prompts]
    wait_until(lambda: all(each.state is State.LOADING for each in waiting), "all wait")
    assert threading.active_count() <= threads + 1, "the watch"
    prefill.run(*prompts, tokens=1)
    for each, tokens in zip(waiting, alone.tokens(*prompts), strict=True):
        assert each.sink.ended.wait(WAIT_S)
        assert each.sink.tokens == tokens
        assert each.sink.cache.outcome == "hit"
    decode.settled()
