"""The connector under vLLM's own scheduler: a hit that does not pay is computed, a load that falls behind is cut, and
the tokens are the same."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import pytest

from mooncache.errors import DeadlineExceeded
from mooncache.kvcache.core.break_even import LOADS_MIN, STEPS_MIN, BreakEven
from mooncache.kvcache.leg_hint import CacheOutcome
from mooncache.kvcache.transfers import MoveFailure
from tests.connectors.harness import BLOCK_TOKENS, WAIT_S, Harness, Make, ask, expected, prompt, warm
from tests.kvcache.faulty import FaultyPool

pytest.importorskip("vllm", reason="vLLM is not installed (scripts/install_vllm.sh)")
pytestmark = pytest.mark.filterwarnings("ignore")  # vLLM's own

ON = {"mooncache.break_even": True}


def teach(
    engine: Harness,
    monkeypatch: pytest.MonkeyPatch,
    *,
    block_s: float,
    load_s: float,
    places: Sequence[tuple[str, ...]] = (),
) -> BreakEven:
    """Let the engine believe these seconds of computing a block and of loading ten; it learns no more."""
    known = engine.connector._scheduler._break_even
    assert isinstance(known, BreakEven)
    for _ in range(STEPS_MIN):
        known.computed(16 * BLOCK_TOKENS, 16 * block_s)
    for _ in range(LOADS_MIN):
        known.loaded(10, 10, load_s, places)
    monkeypatch.setattr(known, "computed", lambda *_: None)
    monkeypatch.setattr(known, "loaded", lambda *_: None)
    monkeypatch.setattr(known, "ask_s", lambda _: WAIT_S)  # a busy machine is late to answer
    return known


def test_a_hit_that_does_not_pay_is_computed(
    make: Make, faulty: FaultyPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokens = prompt(1, 10 * BLOCK_TOKENS + 7)
    warm(make, tokens)
    engine = make(ON)
    known = teach(engine, monkeypatch, block_s=0.001, load_s=10.0)
    known._path((0, "")).trial_s = float("inf")
    faulty.calls.clear()
    engine.add("r", tokens, ask=ask())
    engine.run()
    assert engine.outputs["r"] == expected(tokens, 4)
    reported = engine.reported("r")
    assert (reported["outcome"], reported["hit_tokens"], reported["failed_blocks"]) == (
        "computed_faster",
        0,
        0,
    )
    assert engine.counted["break_even_tokens:computed_faster"] == 10 * BLOCK_TOKENS
    assert reported["reason"] == "10 blocks not loaded: all would take 10000 ms, computing 10 ms"
    assert "get" not in faulty.calls and "put" not in faulty.calls, "nor is it saved again"
    assert engine.leaked_blocks == 0


def test_now_and_then_a_part_is_loaded_all_the_same(
    make: Make, faulty: FaultyPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokens = prompt(2, 10 * BLOCK_TOKENS + 7)
    warm(make, tokens)
    engine = make(ON)
    # It loads a hundred times slower than it computes, and has all the time it needs.
    teach(engine, monkeypatch, block_s=60.0, load_s=60_000.0)
    engine.add("r", tokens, ask=ask())
    engine.run()
    assert engine.outputs["r"] == expected(tokens, 4)
    reported = engine.reported("r")
    assert (reported["outcome"], reported["loaded_tokens"]) == ("computed_faster", BLOCK_TOKENS)
    assert engine.counted["break_even_tokens:computed_faster"] == 9 * BLOCK_TOKENS


def test_a_decode_leg_loads_what_pays(
    make: Make, faulty: FaultyPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokens = prompt(3, 5 * BLOCK_TOKENS + 3)
    decode = make(ON)
    teach(decode, monkeypatch, block_s=60.0, load_s=0.001)
    decode.add("d", tokens, ask=ask("decode", wait_tokens=5 * BLOCK_TOKENS, wait_ms=20_000))
    for _ in range(5):
        decode.step()
    assert decode.status("d") == "WAITING"
    prefill = make(ON)
    prefill.add("p", tokens, max_tokens=1, ask=ask("prefill"))
    prefill.run()
    decode.run()
    assert (decode.reported("d")["outcome"], decode.reported("d")["loaded_tokens"]) == ("hit", 160)
    assert decode.outputs["d"] == expected(tokens, 4)


@pytest.mark.parametrize("came", [0, 3])
def test_a_load_that_stalls_is_cut(
    make: Make, faulty: FaultyPool, monkeypatch: pytest.MonkeyPatch, came: int
) -> None:
    tokens = prompt(4, 10 * BLOCK_TOKENS + 7)
    warm(make, tokens)
    engine = make(ON)
    teach(engine, monkeypatch, block_s=0.1, load_s=0.001)
    faulty.stalls_after = came
    faulty.calls.clear()
    engine.add("r", tokens, ask=ask())
    engine.run()
    assert engine.outputs["r"] == expected(tokens, 4)
    reported = engine.reported("r")
    assert (reported["outcome"], reported["failed_blocks"]) == ("load_cut", 0)
    # On a busy machine the load may have no time at all.
    assert reported["loaded_tokens"] in {0, came * BLOCK_TOKENS}
    missing = 10 * BLOCK_TOKENS - reported["loaded_tokens"]
    assert engine.counted["break_even_tokens:load_cut"] == missing
    assert engine.counted["load_failures:too_slow"] == missing // BLOCK_TOKENS
    assert "put" not in faulty.calls, "the pool has the rest"
    assert engine.leaked_blocks == 0


def test_a_stream_that_stalls_is_cut(make: Make, faulty: FaultyPool, monkeypatch: pytest.MonkeyPatch) -> None:
    tokens = prompt(6, 10 * BLOCK_TOKENS + 7)
    warm(make, tokens)
    blocks, faulty.blocks = dict(faulty.blocks), {}
    decode = make({**ON, "mooncache.stream": "on"})
    teach(decode, monkeypatch, block_s=0.1, load_s=0.001)
    decode.add("d", tokens, ask=ask("decode", wait_tokens=10 * BLOCK_TOKENS, wait_ms=60_000, store_node="n2"))
    decode.run_until(lambda: decode.status("d") == "WAITING_FOR_REMOTE_KVS")
    faulty.stalls_after = 2
    faulty.blocks |= blocks
    decode.run()
    assert decode.outputs["d"] == expected(tokens, 4)
    reported = decode.reported("d")
    assert (reported["outcome"], reported["failed_blocks"]) == ("load_cut", 0)
    assert reported["loaded_tokens"] in {0, BLOCK_TOKENS, 2 * BLOCK_TOKENS}
    assert reported["reason"].startswith(
        f"cut after {reported['loaded_tokens'] // BLOCK_TOKENS} of 10 blocks"
    )
    assert reported["waited_ms"] < 50_000, "it does not wait for the rest"
    assert decode.leaked_blocks == 0


def test_a_decode_leg_does_not_wait_for_what_it_would_not_load(
    make: Make, faulty: FaultyPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokens = prompt(40, 10 * BLOCK_TOKENS + 7)
    decode = make(ON)
    there = [("n2 (dram)",)] * 10
    known = teach(decode, monkeypatch, block_s=0.001, load_s=10.0, places=there)
    waits = ask("decode", wait_tokens=10 * BLOCK_TOKENS, wait_ms=60_000, store_node="n2")
    decode.add("trial", tokens, ask=waits)
    decode.run_until(lambda: "watch" in faulty.calls)
    assert faulty.watched in ([(None, 1)], [("n2", 1)]), "a trial waits for what it will load"
    decode.add("d", tokens, ask=waits)
    decode.run_until(lambda: "d" in decode.finished)
    assert decode.outputs["d"] == expected(tokens, 4)
    reported = decode.reported("d")
    assert (reported["outcome"], reported["loaded_tokens"]) == ("computed_faster", 0)
    assert (
        reported["reason"] == "10 blocks not loaded: all from n2 (dram) would take 10000 ms, computing 10 ms"
    )
    assert known.load_s(10, there) == pytest.approx(10.0)
    decode.run()
    assert decode.outputs["trial"] == expected(tokens, 4), (
        "it has the block that the other one saved, or computes it"
    )
    assert decode.reported("trial")["loaded_tokens"] in {0, BLOCK_TOKENS}
    assert decode.leaked_blocks == 0


def test_an_abort_while_a_load_stalls_frees_its_blocks_when_it_is_cut(
    make: Make, faulty: FaultyPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm.v1.request import RequestStatus

    tokens = prompt(7, 10 * BLOCK_TOKENS + 7)
    warm(make, tokens)
    engine = make(ON, blocks=14)
    teach(engine, monkeypatch, block_s=0.2, load_s=0.001)
    faulty.stalls_after = 3
    faulty.calls.clear()
    engine.add("r", tokens)
    engine.run_until(lambda: "get" in faulty.calls)
    engine.scheduler.finish_requests("r", RequestStatus.FINISHED_ABORTED)
    other = prompt(8, 5 * BLOCK_TOKENS)
    engine.add("other", other, ask=ask())
    engine.run()
    assert engine.outputs["other"] == expected(other, 4)
    assert engine.leaked_blocks == 0


def test_preempted_requests_whose_loads_stall_come_back(
    make: Make, faulty: FaultyPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts = {name: prompt(20 + number, 3 * BLOCK_TOKENS + 5) for number, name in enumerate("abc")}
    for tokens in prompts.values():
        warm(make, tokens)
    engine = make(ON, blocks=12)
    teach(engine, monkeypatch, block_s=0.05, load_s=0.001)
    faulty.stalls_after = 4
    requests = [engine.add(name, tokens, max_tokens=90) for name, tokens in prompts.items()]
    engine.run()
    assert sum(request.num_preemptions for request in requests) > 0
    for name, tokens in prompts.items():
        assert engine.outputs[name] == expected(tokens, 90)
    assert engine.leaked_blocks == 0
    engine.connector._scheduler._book.check()


def test_a_pool_that_is_late_to_answer_is_not_waited_for(
    make: Make, faulty: FaultyPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokens = prompt(9, 10 * BLOCK_TOKENS + 7)
    warm(make, tokens)
    engine = make(ON)
    known = teach(engine, monkeypatch, block_s=0.05, load_s=0.001)
    monkeypatch.setattr(known, "ask_s", lambda _: 0.05)

    def late(*_: Any, timeout_s: float, **__: Any) -> Any:
        threading.Event().wait(timeout_s)
        raise DeadlineExceeded("late")

    monkeypatch.setattr(faulty, "match", late)
    engine.add("r", tokens, ask=ask())
    engine.run()
    assert engine.outputs["r"] == expected(tokens, 4)
    reported = engine.reported("r")
    assert (reported["outcome"], reported["loaded_tokens"]) == ("failed", 0)
    assert "did not say within" in reported["reason"]
    assert engine.counted["lookups:late"] == 1


def test_blocks_of_a_slow_node_are_computed_and_those_of_a_near_one_loaded(
    make: Make, faulty: FaultyPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokens = prompt(30, 10 * BLOCK_TOKENS + 7)
    warm(make, tokens)
    keys = list(faulty.blocks)
    faulty.places = {key: ("near" if at < 4 else "far", "dram") for at, key in enumerate(keys)}
    engine = make(ON)
    known = teach(engine, monkeypatch, block_s=60.0, load_s=0.001, places=[("near (dram)",)] * 10)
    for _ in range(LOADS_MIN):
        BreakEven.loaded(known, 10, 10, 100_000.0, [("far (dram)",)] * 10)
    known._path((0, "far (dram)")).trial_s = float("inf")
    engine.add("r", tokens, ask=ask())
    engine.run()
    assert engine.outputs["r"] == expected(tokens, 4)
    reported = engine.reported("r")
    assert (reported["outcome"], reported["loaded_tokens"]) == ("computed_faster", 4 * BLOCK_TOKENS)
    assert reported["reason"].startswith("6 of 10 blocks not loaded: all from far (dram) would take ")


def test_ranks_that_stop_at_different_blocks_go_on_behind_the_first_that_is_missing(
    make: Make, faulty: FaultyPool
) -> None:
    """Each rank keeps the pace that the scheduler's side set, and each may fall behind at another block."""
    from mooncache.connectors.vllm.messages import LoadEnd, StepReport
    from mooncache.kvcache.core.weighing import ShardLoad

    engine = make(ON)
    side = engine.connector._scheduler
    side.handshake(side._handshakes * 2)
    tokens = prompt(31, 10 * BLOCK_TOKENS + 7)
    side._book.add("r", tokens, salt="", params={"mooncache": ask()})
    side._requests["r"] = None
    assert side._book.match("r", 0, 0.0, pool_usable=True).tokens is None
    side._book.answered("r", [True] * 20, CacheOutcome.UNKNOWN, 0.0, 0.0)
    assert side._book.match("r", 0, 0.0, pool_usable=True).tokens == 10 * BLOCK_TOKENS
    order = side._book.allocated("r", [list(range(1, 11))], 10 * BLOCK_TOKENS)
    assert order.pace is not None and len(order.keys) == 2, "one pace for both ranks"
    one = LoadEnd(7, 700, 0.3, MoveFailure.TOO_SLOW, by_shard={0: ShardLoad(7, 0.3, True)})
    two = LoadEnd(4, 400, 0.1, MoveFailure.MISSING, by_shard={1: ShardLoad(4, 0.1, False)})
    side.reported(StepReport({"r": one}))
    assert side._book.is_loading("r"), "the other rank still writes into its part"
    side.reported(StepReport({"r": two}))
    state = side._book._requests["r"]
    assert (state.loading, state.loaded_tokens, state.failed_blocks) == (None, 4 * BLOCK_TOKENS, 6)
    assert list(state.known[0][3:6]) == [1, 0, 0], "what is missing is saved again"


def test_under_the_policy_fail_no_load_is_cut(
    make: Make, faulty: FaultyPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokens = prompt(5, 10 * BLOCK_TOKENS + 7)
    warm(make, tokens)
    engine = make(ON, policy="fail")
    teach(engine, monkeypatch, block_s=1e-9, load_s=1e-9)
    paces: list[Any] = []
    plain = engine.worker._worker._job
    monkeypatch.setattr(
        engine.worker._worker, "_job", lambda transfer: (paces.append(transfer.pace), plain(transfer))[1]
    )
    engine.add("r", tokens, ask=ask())
    engine.run()
    assert (engine.reported("r")["outcome"], engine.reported("r")["loaded_tokens"]) == ("hit", 320)
    assert engine.outputs["r"] == expected(tokens, 4)
    assert paces and set(paces) == {None}


def test_the_engine_measures_its_own_steps_and_loads(make: Make, faulty: FaultyPool) -> None:
    engine = make(ON)
    known = engine.connector._scheduler._break_even
    for number in range(STEPS_MIN):
        assert known.compute_s(10) is None
        engine.add(f"p{number}", prompt(10 + number, 4 * BLOCK_TOKENS))
        engine.run()
    assert known.compute_s(10) > 0
    other = make(ON)
    for number in range(LOADS_MIN):
        assert other.connector._scheduler._break_even.load_s(4) is None
        other.add(f"p{number}", prompt(10 + number, 4 * BLOCK_TOKENS))
        other.run()
        other.counted.clear()
    assert other.connector._scheduler._break_even.load_s(4) > 0


def test_switched_off_everything_is_loaded(make: Make, faulty: FaultyPool) -> None:
    engine = make({"mooncache.break_even": False})
    assert engine.connector._scheduler._break_even is None


def test_it_is_on_unless_it_is_switched_off() -> None:
    from mooncache.connectors.vllm.settings import read_settings

    assert read_settings({}).connector.break_even
    assert not read_settings({"mooncache.break_even": False}).connector.break_even
