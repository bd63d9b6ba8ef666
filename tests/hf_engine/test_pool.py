"""The engine and a real pool: what one engine computes another one loads, and whatever fails is computed again."""

from __future__ import annotations

import dataclasses
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import mooncache
from mooncache.client.keys import split_keys
from mooncache.errors import Draining, MasterUnavailable
from mooncache.hf_engine.core.sequence import State
from mooncache.kvcache.keys import request_keys
from mooncache.kvcache.leg_hint import LegHint, LegRole
from tests.conditions import wait_until
from tests.hf_engine.conftest import BLOCK, WAIT_S, Lab, prompt, start_cluster

Connect = Callable[[], Any]


class Faulty:
    """A real client whose calls a test can break or hold up."""

    def __init__(self, client: mooncache.Client) -> None:
        self.client = client
        self.break_get: Callable[[Sequence[Any], Any], Any] | None = None
        self.gate = threading.Event()
        self.gate.set()
        self.in_get = threading.Event()

    def get_many_into(self, keys: Any, views: Any, **more: Any) -> Any:
        self.in_get.set()
        assert self.gate.wait(WAIT_S)
        result = self.client.get_many_into(keys, views, **more)
        return self.break_get(views, result) if self.break_get else result

    def __getattr__(self, name: str) -> Any:
        return getattr(self.client, name)


@pytest.fixture
def faulty(connect: Connect) -> Faulty:
    return Faulty(connect())


def keys_of(lab: Lab, tokens: list[int], salt: str = "") -> list[bytes]:
    return split_keys(request_keys(lab.parts.passport, tokens, salt=salt))


def figure(lab: Lab, name: str, **labels: str) -> float:
    found = lab.engine.metrics.registry.registry.get_sample_value(f"mooncache_hf_{name}", labels)
    assert found is not None, name
    return float(found)


def test_another_engine_loads_what_one_saved(make_lab: Callable[..., Lab], connect: Connect) -> None:
    first, second, alone = make_lab(connect), make_lab(connect), make_lab()
    for length in (BLOCK, BLOCK + 1, 5 * BLOCK, 300):
        one = prompt(length, 77)
        computed = first.run(one)[0]
        assert computed.cache.hit_tokens == 0 and computed.cache.outcome == "miss"
        # As many as were complete: the prompt's, and the one that the answer filled.
        assert computed.cache.saved_blocks == (length + 12 - 1) // BLOCK
        first.settled()
        loaded = second.run(one)[0]
        blocks = (length - 1) // BLOCK
        assert loaded.cache.loaded_tokens == loaded.cache.hit_tokens == blocks * BLOCK
        assert loaded.cache.loaded_bytes == blocks * second.parts.runner.memory.block_bytes
        assert loaded.cache.local_tokens == 0 and loaded.cache.failed_blocks == 0
        assert loaded.cache.outcome == ("hit" if blocks else "miss")
        assert [computed.tokens] == [loaded.tokens] == alone.tokens(one)
    second.settled()


def test_answers_are_saved_for_the_next_turn(make_lab: Callable[..., Lab], connect: Connect) -> None:
    first, second = make_lab(connect), make_lab(connect)
    turn = prompt(70, 5)
    answer = first.tokens(turn, tokens=50)[0]
    first.settled()
    later = second.run(turn + answer)[0]
    assert later.cache.loaded_tokens == (70 + 50 - 1) // BLOCK * BLOCK
    off = make_lab(connect, connector__save_decode_blocks=False)
    other = prompt(70, 6)
    reported = off.run(other, tokens=50)[0].cache
    assert reported.saved_blocks == 70 // BLOCK


def test_a_batch_loads_and_computes_at_once(make_lab: Callable[..., Lab], connect: Connect) -> None:
    first, second, alone = make_lab(connect), make_lab(connect), make_lab()
    known = [prompt(100 + 9 * seed, 100 + seed) for seed in range(6)]
    new = [prompt(100 + 9 * seed, 200 + seed) for seed in range(6)]
    first.run(*known)
    first.settled()
    results = second.run(*known, *new)
    assert [result.tokens for result in results] == alone.tokens(*known, *new)
    assert [result.cache.outcome for result in results] == ["hit"] * 6 + ["miss"] * 6
    second.settled()


def test_public_tokens_are_shared_and_the_rest_is_not(make_lab: Callable[..., Lab], connect: Connect) -> None:
    first, second = make_lab(connect), make_lab(connect)
    one = prompt(10 * BLOCK, 31)
    hint = LegHint(public_tokens=4 * BLOCK + 3, public_salt="everybody")
    first.run(one, salt="tenant-1", hint=hint)
    first.settled()
    assert second.run(one, salt="tenant-2")[0].cache.hit_tokens == 0
    assert second.run(one, salt="tenant-3", hint=hint)[0].cache.hit_tokens == 4 * BLOCK


def test_a_block_missing_in_the_middle(make_lab: Callable[..., Lab], connect: Connect) -> None:
    first, second = make_lab(connect), make_lab(connect)
    one = prompt(200, 41)
    tokens = first.tokens(one)[0]
    first.settled()
    with connect() as client:
        assert client.remove(keys_of(first, one)[5])
    result = second.run(one)[0]
    assert result.tokens == tokens
    assert result.cache.hit_tokens == 5 * BLOCK and result.cache.outcome == "partial"
    second.settled()
    with connect() as client:
        assert client.match(keys_of(first, one)).leading_blocks == 12, "what was missing is there again"


def test_a_corrupted_block_in_the_middle(
    make_lab: Callable[..., Lab], connect: Connect, faulty: Faulty
) -> None:
    first = make_lab(connect)
    one = prompt(200, 42)
    tokens = first.tokens(one)[0]
    first.settled()

    def corrupt(views: Sequence[Any], result: Any) -> Any:
        """What the SDK does on a checksum mismatch: the code says so, the destination holds anything (here NaN)."""
        codes = list(result.codes)
        codes[7] = 202
        views[7][:] = b"\xff" * len(views[7])
        return dataclasses.replace(result, codes=tuple(codes))

    second = make_lab(lambda: faulty)
    faulty.break_get = corrupt
    result = second.run(one)[0]
    assert result.tokens == tokens
    assert result.cache.hit_tokens == 7 * BLOCK and result.cache.outcome == "failed"
    assert result.cache.failed_blocks == 12 - 7
    second.settled()


def test_a_load_that_raises_is_computed(
    make_lab: Callable[..., Lab], connect: Connect, faulty: Faulty
) -> None:
    first = make_lab(connect)
    one = prompt(150, 43)
    tokens = first.tokens(one)[0]
    first.settled()

    def explode(views: Sequence[Any], result: Any) -> Any:
        raise RuntimeError("a defect")

    second = make_lab(lambda: faulty)
    faulty.break_get = explode
    result = second.run(one)[0]
    assert result.tokens == tokens and result.cache.hit_tokens == 0 and result.cache.outcome == "failed"
    assert figure(second, "pool_errors_total", what="load", code="DEFECT") == 1
    assert figure(second, "pool_load_failed_blocks_total") == 9
    second.settled()


def test_a_load_that_waited_too_long_behind_others_is_computed(
    make_lab: Callable[..., Lab], connect: Connect, faulty: Faulty
) -> None:
    first = make_lab(connect)
    one, two = prompt(150, 45), prompt(150, 46)
    expected = first.tokens(one, two)
    first.settled()
    lab = make_lab(lambda: faulty, connector__load_threads=1, connector__load_timeout_s=0.2)
    faulty.gate.clear()
    gets: list[float] = []

    def count(views: Sequence[Any], result: Any) -> Any:
        gets.append(time.monotonic())
        return result

    faulty.break_get = count
    started_s = time.monotonic()
    loading = lab.submit(one, two)
    wait_until(lambda: all(item.state is State.LOADING for item in loading), "both load")
    wait_until(lambda: time.monotonic() - started_s > 0.5, "the limit is over")
    faulty.gate.set()
    for sequence, tokens in zip(loading, expected, strict=True):
        assert sequence.sink.ended.wait(WAIT_S) and sequence.sink.tokens == tokens
    assert len(gets) == 1, "the second one had no time left"
    assert loading[1].sink.cache.outcome == "failed"
    lab.settled()


def test_a_client_that_cannot_be_made_is_tried_again(make_lab: Callable[..., Lab], connect: Connect) -> None:
    tries: list[int] = []

    def broken_first() -> Any:
        tries.append(1)
        if len(tries) == 1:
            raise OSError("a defect")
        return connect()

    lab = make_lab(broken_first)  # waits until the pool is found
    assert len(tries) == 2
    assert lab.run(prompt(100, 47))[0].cache.outcome == "miss"
    lab.settled()


def test_an_evicted_local_copy_is_offered_again(make_lab: Callable[..., Lab], connect: Connect) -> None:
    lab = make_lab(connect)
    one = prompt(100, 44)
    lab.run(one)
    lab.settled()
    keys = keys_of(lab, one)
    with connect() as client:
        for key in keys:
            assert client.remove(key)
        reported = lab.run(one)[0].cache
        assert reported.local_tokens == 96
        lab.settled()
        assert client.match(keys).leading_blocks == 6


def test_awaited_blocks_that_come(make_lab: Callable[..., Lab], connect: Connect) -> None:
    prefill, decode = make_lab(connect), make_lab(connect)
    one = prompt(200, 51)
    hint = LegHint(role=LegRole.DECODE, wait_tokens=12 * BLOCK, wait_ms=60_000)
    waiting = decode.submit(one, hint=hint)[0]
    decode.on_engine(lambda: None)
    assert waiting.state is State.LOOKUP and not waiting.sink.first.is_set()
    first = prefill.run(one, tokens=1)[0]
    assert waiting.sink.ended.wait(WAIT_S)
    reported = waiting.sink.cache
    assert reported.loaded_tokens == reported.hit_tokens == 12 * BLOCK and reported.outcome == "hit"
    assert reported.waited_ms > 0
    assert waiting.sink.tokens[:1] == first.tokens
    decode.forget()
    assert waiting.sink.tokens == decode.tokens(one)[0]
    decode.settled()


def test_awaited_blocks_that_never_come(make_lab: Callable[..., Lab], connect: Connect) -> None:
    lab, alone = make_lab(connect), make_lab()
    one = prompt(200, 52)
    result = lab.run(one, hint=LegHint(role=LegRole.DECODE, wait_tokens=12 * BLOCK, wait_ms=50))[0]
    assert result.cache.outcome == "timeout" and result.cache.hit_tokens == 0 and result.cache.waited_ms >= 50
    assert [result.tokens] == alone.tokens(one)


def test_others_run_while_one_waits(make_lab: Callable[..., Lab], connect: Connect) -> None:
    lab = make_lab(connect, hf__batch_max=1)
    waiting = lab.submit(prompt(200, 53), hint=LegHint(wait_tokens=192, wait_ms=60_000))[0]
    assert len(lab.tokens(prompt(50, 54))[0]) == 12
    assert waiting.state is State.LOOKUP
    lab.engine.abort([waiting])
    assert waiting.sink.ended.wait(WAIT_S) and waiting.sink.finish == "abort"
    lab.settled()


def test_abort_while_loading_frees_only_after_the_load(
    make_lab: Callable[..., Lab], connect: Connect, faulty: Faulty
) -> None:
    first = make_lab(connect)
    one = prompt(200, 61)
    first.run(one)
    first.settled()
    lab = make_lab(lambda: faulty)
    faulty.gate.clear()
    loading = lab.submit(one)[0]
    assert faulty.in_get.wait(WAIT_S)
    lab.engine.abort([loading])
    lab.on_engine(lambda: None)
    assert loading.state is State.LOADING and not loading.sink.ended.is_set()
    assert lab.on_engine(lambda: lab.engine.blocks.free_count) < lab.engine.blocks.count
    faulty.gate.set()
    assert loading.sink.ended.wait(WAIT_S) and loading.sink.finish == "abort"
    lab.settled()


def test_abort_in_every_state_leaks_nothing(make_lab: Callable[..., Lab], connect: Connect) -> None:
    lab = make_lab(connect, hf__batch_max=4)
    sequences = lab.submit(*(prompt(100, 300 + seed) for seed in range(12)), tokens=400)
    assert sequences[0].sink.first.wait(WAIT_S)
    lab.engine.abort(sequences)
    for sequence in sequences:
        assert sequence.sink.ended.wait(WAIT_S) and sequence.sink.finish == "abort"
    lab.settled()


def test_no_pool_at_first_and_later_one(make_lab: Callable[..., Lab], connect: Connect) -> None:
    there = threading.Event()

    def later() -> Any:
        if not there.is_set():
            raise MasterUnavailable("not yet")
        return connect()

    later.reachable = False  # type: ignore[attr-defined]
    lab = make_lab(later)
    result = lab.run(prompt(100, 71))[0]
    assert result.cache.outcome == "pool_absent" and len(result.tokens) == 12
    there.set()
    assert lab.parts.pool is not None and lab.parts.pool.link.connected.wait(WAIT_S), "the pool is found"
    assert lab.run(prompt(100, 72))[0].cache.outcome == "miss"
    lab.settled()


def test_the_pool_dies_and_the_engine_goes_on(make_lab: Callable[..., Lab], tmp_path: Path) -> None:
    cluster = start_cluster(tmp_path / "pool")
    try:
        lab = make_lab(lambda: mooncache.connect(**cluster.client_settings()), connector__save_timeout_s=1)
        alone = make_lab()
        prompts = [prompt(150, 400 + seed) for seed in range(4)]
        expected = alone.tokens(*prompts, tokens=30)
        assert lab.tokens(*prompts, tokens=30) == expected
        lab.settled()
        lab.forget()
        running = lab.submit(*prompts, tokens=30)
        for name in list(cluster.parts):
            cluster.kill(name)
        for sequence, tokens in zip(running, expected, strict=True):
            assert sequence.sink.ended.wait(WAIT_S) and sequence.sink.tokens == tokens
        lab.forget()
        after = lab.run(*prompts, tokens=30)
        assert [result.tokens for result in after] == expected
        assert {result.cache.outcome for result in after} <= {"pool_absent", "failed"}
        lab.settled()
    finally:
        cluster.stop()


@pytest.mark.parametrize("taken", [0, 4, 100])
def test_what_the_pool_does_not_get_is_told(
    make_lab: Callable[..., Lab], connect: Connect, monkeypatch: pytest.MonkeyPatch, taken: int
) -> None:
    """A decode leg elsewhere must not wait for blocks that were never handed over."""
    lab, alone = make_lab(connect), make_lab()
    assert lab.parts.pool is not None
    monkeypatch.setattr(lab.parts.pool, "saved_blocks_max", taken)
    one = prompt(10 * BLOCK + 3, 91)
    reported = lab.run(one, tokens=1)[0]
    assert reported.cache.asked_tokens == 10 * BLOCK
    assert reported.cache.held_tokens == min(taken, 10) * BLOCK
    assert figure(lab, "pool_saves_total", outcome="queue_full") == 10 - min(taken, 10)
    without = alone.run(one, tokens=1)[0]
    assert [reported.tokens] == [without.tokens]
    assert without.cache.held_tokens == 0
    lab.settled()


def test_blocks_that_the_pool_refused_are_not_told_as_held(
    make_lab: Callable[..., Lab], connect: Connect, faulty: Faulty
) -> None:
    lab = make_lab(lambda: faulty)
    refused = threading.Event()

    def put_many(keys: Any, views: Any, **more: Any) -> Any:
        del views, more
        refused.set()
        return SimpleNamespace(codes=[Draining.code] * len(keys))

    faulty.put_many = put_many  # type: ignore[attr-defined]
    sequence = lab.submit(prompt(6 * BLOCK, 92), tokens=200)[0]
    wait_until(lambda: 0 in sequence.unsaved, "the engine has heard of it")
    assert sequence.sink.ended.wait(WAIT_S)
    assert refused.is_set()
    # The last block may still be on its way when the answer ends.
    assert sequence.sink.cache.held_tokens == 0 and sequence.sink.cache.saved_blocks <= 1
