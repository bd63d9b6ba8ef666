"""The small engine: what loads slower than it computes is computed, with the same tokens."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest

import mooncache
from mooncache.errors import DeadlineExceeded
from mooncache.kvcache.core.break_even import LOADS_MIN, STEPS_MIN
from tests.conditions import wait_until
from tests.hf_engine.conftest import BLOCK, WAIT_S, Lab, prompt
from tests.hf_engine.test_pool import figure

Connect = Callable[[], Any]


class Stalling:
    """A real client whose reads take all the time that they have, or `delay_s`."""

    def __init__(self, client: mooncache.Client) -> None:
        self.client = client
        self.stalled = False
        self.delay_s = 0.0
        self.reads = 0

    def get_many_into(self, keys: Any, views: Any, *, timeout_s: float) -> Any:
        self.reads += 1
        if self.stalled or self.delay_s > timeout_s:
            time.sleep(timeout_s)
            raise DeadlineExceeded("nothing comes")
        time.sleep(self.delay_s)
        return self.client.get_many_into(keys, views, timeout_s=timeout_s)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.client, name)


@pytest.fixture
def slow(connect: Connect) -> Stalling:
    return Stalling(connect())


def learn(lab: Lab, *, block_s: float, load_s: float | None = None) -> None:
    """Let the engine believe these times of computing a block and loading nine; of them it learns no more."""
    known = lab.engine.break_even
    assert known is not None

    def teach() -> None:
        for _ in range(64):
            known.computed(16 * BLOCK, 16 * block_s)
        known.computed = lambda *_: None  # type: ignore[method-assign]
        known.ask_s = lambda _: WAIT_S  # type: ignore[method-assign]
        for _ in range(LOADS_MIN if load_s is not None else 0):
            known.loaded(9, 9, load_s or 0.0, [("node-1 (dram)",)] * 9)

    lab.on_engine(teach)


def test_a_path_that_stalls_is_cut_and_then_left_alone(
    make_lab: Callable[..., Lab], connect: Connect, slow: Stalling
) -> None:
    first = make_lab(connect)
    prompts = [prompt(150, 600 + number) for number in range(12)]
    expected = first.tokens(*prompts)
    first.settled()
    lab = make_lab(lambda: slow, connector__break_even=True)
    learn(lab, block_s=0.01, load_s=0.002)
    slow.stalled = True
    outcomes = []
    for one, tokens in zip(prompts, expected, strict=True):
        result = lab.run(one)[0]
        assert result.tokens == tokens
        assert result.cache.hit_tokens == 0 and result.cache.failed_blocks == 0
        outcomes.append(result.cache.outcome)
    assert outcomes[0] == "load_cut"
    assert "computed_faster" in outcomes
    assert slow.reads < len(prompts)
    assert figure(lab, "break_even_tokens_total", reason="load_cut") >= 9 * BLOCK
    assert figure(lab, "break_even_tokens_total", reason="computed_faster") >= 9 * BLOCK
    assert lab.parts.pool is not None and lab.parts.pool.link.usable
    lab.settled()


def test_a_throttled_path_is_computed_and_used_again_when_it_recovers(
    make_lab: Callable[..., Lab], connect: Connect, slow: Stalling, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = make_lab(connect)
    prompts = [prompt(150, 700 + number) for number in range(6)]
    expected = first.tokens(*prompts)
    first.settled()
    lab = make_lab(lambda: slow, connector__break_even=True)
    learn(lab, block_s=60.0, load_s=5400.0)  # it has seen loads that took ten times as long as computing
    assert lab.engine.break_even is not None
    path = lab.engine.break_even._path((0, "node-1 (dram)"))
    path.trial_s = float("inf")
    result = lab.run(prompts[0])[0]
    assert result.tokens == expected[0]
    assert (result.cache.outcome, result.cache.hit_tokens, slow.reads) == ("computed_faster", 0, 0)
    path.trial_s = 0.0
    result = lab.run(prompts[1])[0]
    assert result.tokens == expected[1]
    assert (result.cache.outcome, result.cache.loaded_tokens) == ("computed_faster", BLOCK), "a trial"
    for one, tokens in zip(prompts[2:], expected[2:], strict=True):
        result = lab.run(one)[0]
        assert result.tokens == tokens
        assert (result.cache.outcome, result.cache.loaded_tokens) == ("hit", 9 * BLOCK)
    lab.settled()


def test_the_engine_measures_its_own_steps_and_loads(make_lab: Callable[..., Lab], connect: Connect) -> None:
    first = make_lab(connect, connector__break_even=True)
    known = first.engine.break_even
    assert known is not None and known.compute_s(9) is None
    for number in range(STEPS_MIN):
        first.run(prompt(150, 800 + number))
    first.settled()
    assert (known.compute_s(9) or 0) > 0
    second = make_lab(connect, connector__break_even=True)
    assert second.engine.break_even is not None
    for number in range(LOADS_MIN):
        second.run(prompt(150, 800 + number))
    there = [("node-1 (dram)",)] * 9
    wait_until(lambda: second.engine.break_even.load_s(9, there) is not None, "loads are known")


def test_switched_off_everything_is_loaded(make_lab: Callable[..., Lab], connect: Connect) -> None:
    assert make_lab(connect).engine.break_even is None
