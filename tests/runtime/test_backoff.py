"""Pauses that double: the steps, the cap, and the jitter."""

import random

from mooncache.runtime.backoff import Backoff, jittered_s, step_s


def test_steps_double_up_to_the_cap() -> None:
    assert [step_s(attempt, 0.5, 3.0) for attempt in range(5)] == [0.5, 1.0, 2.0, 3.0, 3.0]
    assert step_s(3, 0.5) == 4.0
    assert step_s(10_000, 0.5, 60.0) == 60.0


def test_a_wait_is_between_half_of_the_step_and_the_whole() -> None:
    assert (jittered_s(4.0, 0.0), jittered_s(4.0, 1.0)) == (2.0, 4.0)
    backoff = Backoff(random.Random(1), first_s=1.0, cap_s=8.0)
    waits = [backoff.next_s() for _ in range(6)]
    assert all(step / 2 <= wait <= step for wait, step in zip(waits, (1, 2, 4, 8, 8, 8), strict=True))
    backoff.reset()
    assert backoff.next_s() <= 1.0
