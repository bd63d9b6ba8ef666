"""When an engine is started, killed and given up, from its history alone."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mooncache.runtime.supervision import RestartPolicy, RunState, Supervision, exit_words, pause_s

POLICY = RestartPolicy(
    start_timeout_s=100, hang_timeout_s=10, backoff_first_s=1, backoff_max_s=60, restart_count_max=3
)


def test_pause_doubles_up_to_its_limit() -> None:
    pauses = [pause_s(POLICY, ends, 1.0) for ends in (1, 2, 3, 4, 20, 10_000)]
    assert pauses == [1, 2, 4, 8, 60, 60]
    assert pause_s(POLICY, 3, 0.0) == 2


def test_a_crash_is_followed_by_a_pause_and_a_start() -> None:
    engine = Supervision(POLICY)
    assert engine.due(0)
    engine.started(0)
    assert engine.state == RunState.STARTING
    assert engine.heard(5)
    assert not engine.heard(6)
    assert engine.state == RunState.READY
    assert engine.ended(7, "exit code 1", 1.0)
    assert engine.state == RunState.DOWN
    assert "exit code 1" in engine.reason
    assert not engine.due(7.9)
    assert engine.due(8.0)


def test_what_worked_is_started_again_at_once_but_only_the_first_time() -> None:
    policy = replace(POLICY, first_at_once=True)
    service = Supervision(policy)
    service.started(0)
    service.heard(1)
    service.ended(7, "signal SIGKILL", 1.0)
    assert service.due(7)
    service.started(7)
    service.heard(8)
    service.ended(9, "signal SIGKILL", 1.0)
    assert not service.due(10.9)
    assert service.due(11)
    never_ready = Supervision(policy)
    never_ready.started(0)
    never_ready.ended(1, "exit code 1", 1.0)
    assert not never_ready.due(1.9)


def test_what_was_never_ready_is_given_up_sooner() -> None:
    policy = replace(POLICY, first_restart_count_max=1)
    engine = Supervision(policy)
    engine.started(0)
    assert engine.ended(1, "no such model", 0.0)
    engine.started(2)
    assert not engine.ended(3, "no such model", 0.0)
    assert engine.state == RunState.GIVEN_UP
    assert "no such model" in engine.reason
    other = Supervision(policy)
    other.started(0)
    other.heard(1)
    for at_s in (2, 4, 6):
        assert other.ended(at_s, "exit code 1", 0.0)
        other.started(at_s + 1)
    assert not other.ended(8, "exit code 1", 0.0)


def test_an_engine_that_never_gets_healthy_is_killed() -> None:
    engine = Supervision(POLICY)
    engine.started(0)
    assert engine.silent(99) == ""
    assert "100 s" in engine.silent(101)


def test_silence_is_suspect_first_and_a_hang_later() -> None:
    engine = Supervision(POLICY)
    engine.started(0)
    engine.heard(50)
    assert engine.silent(55) == ""
    assert "5.0 s" in engine.reason
    engine.heard(56)
    assert engine.reason == ""
    assert engine.silent(66) == ""
    assert engine.silent(66.1)


def test_an_engine_that_answers_and_does_not_move_is_stalled() -> None:
    engine = Supervision(POLICY)
    engine.started(0)
    engine.heard(0)
    engine.progress(10, moved=False)
    engine.progress(49, moved=False)
    assert engine.stalled(50) == ""
    assert "40 s" in engine.stalled(50.1)
    engine.progress(51, moved=True)
    assert engine.stalled(1000) == ""
    engine.progress(1000, moved=False)
    engine.ended(1001, "exit code 1", 0)
    engine.started(1003)
    engine.heard(1003)
    assert engine.stalled(2000) == ""


def test_too_many_ends_are_the_last_ones() -> None:
    engine = Supervision(POLICY)
    for number in range(4):
        engine.started(number)
        again = engine.ended(number, "exit code 7", 0.5)
        assert again is (number < 3)
    assert engine.state == RunState.GIVEN_UP
    assert "4 failures" in engine.reason
    assert "exit code 7" in engine.reason
    assert not engine.due(1e9)


def test_old_ends_are_forgiven() -> None:
    engine = Supervision(POLICY)
    for number in range(50):
        now_s = number * 400.0
        engine.started(now_s)
        assert engine.ended(now_s, "exit code 1", 0.0)
        engine.check()


def test_an_attached_engine_is_looked_for_again() -> None:
    engine = Supervision(POLICY)
    for number in range(20):
        engine.started(number)
        engine.lost(number, "gone")
        assert engine.due(number)


@given(
    st.lists(st.tuples(st.sampled_from(["start", "hear", "silent", "end"]), st.floats(0, 300)), max_size=60)
)
def test_any_history_keeps_the_invariants(steps: list[tuple[str, float]]) -> None:
    engine, now_s = Supervision(POLICY), 0.0
    for what, delta_s in steps:
        now_s += delta_s
        if what == "start" and engine.due(now_s):
            engine.started(now_s)
        elif what == "hear":
            engine.heard(now_s)
        elif engine.state in (RunState.STARTING, RunState.READY) and (what == "end" or engine.silent(now_s)):
            engine.ended(now_s, what, 0.3)
        engine.check()


@pytest.mark.parametrize(("code", "words"), [(0, "exit code 0"), (1, "exit code 1"), (137, "signal 9")])
def test_exit_words(code: int, words: str) -> None:
    assert exit_words(code) == words
