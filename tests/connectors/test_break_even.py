"""The connector under vLLM's own scheduler: a hit that does not pay is computed, a load that falls behind is cut, and
the tokens are the same."""

from __future__ import annotations

from typing import Any

import pytest

from mooncache.kvcache.core.break_even import LOADS_MIN, STEPS_MIN, BreakEven
from tests.connectors.harness import BLOCK_TOKENS, Harness, Make, ask, expected, prompt, warm
from tests.kvcache.faulty import FaultyPool

pytest.importorskip("vllm", reason="vLLM is not installed (scripts/install_vllm.sh)")
pytestmark = pytest.mark.filterwarnings("ignore")  # vLLM's own

ON = {"mooncache.break_even": True}


def teach(engine: Harness, monkeypatch: pytest.MonkeyPatch, *, block_s: float, load_s: float) -> BreakEven:
    """Let the engine believe these seconds of computing a block and of loading ten; it learns no more."""
    known = engine.connector._scheduler._break_even
    assert isinstance(known, BreakEven)
    for _ in range(STEPS_MIN):
        known.computed(16 * BLOCK_TOKENS, 16 * block_s)
    for _ in range(LOADS_MIN):
        known.loaded(10, 10, load_s)
    monkeypatch.setattr(known, "computed", lambda *_: None)
    monkeypatch.setattr(known, "loaded", lambda *_: None)
    return known


def test_a_hit_that_does_not_pay_is_computed(
    make: Make, faulty: FaultyPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokens = prompt(1, 10 * BLOCK_TOKENS + 7)
    warm(make, tokens)
    engine = make(ON)
    known = teach(engine, monkeypatch, block_s=0.001, load_s=10.0)
    monkeypatch.setattr(known, "_trial_at_s", float("inf"))
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
