"""Waiting time between attempts: doubles up to a cap. With jitter many nodes do not return at the same moment.

Everything that waits longer each time takes its steps from `step_s`; it is pure, so that cores use it too.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import inf
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    import random

_DOUBLINGS_MAX: Final = 30  # more would only overflow


def step_s(attempt: int, first_s: float, cap_s: float = inf) -> float:
    """The step of an attempt, counted from 0: `first_s`, then twice as long each time, at most `cap_s`."""
    return min(cap_s, first_s * 2.0 ** min(max(attempt, 0), _DOUBLINGS_MAX))


def jittered_s(step_s: float, jitter: float) -> float:
    """A wait between half of a step and the whole of it; `jitter` is from 0 to 1."""
    return step_s * (0.5 + 0.5 * jitter)


@dataclass(slots=True)
class Backoff:
    """`next_s` gives the next wait in seconds; `reset` after a success."""

    random: random.Random
    first_s: float = 0.05
    cap_s: float = 2.0
    attempts: int = 0

    def next_s(self) -> float:
        """A wait between half of the current step and the whole of it."""
        step = step_s(self.attempts, self.first_s, self.cap_s)
        self.attempts += 1
        return jittered_s(step, self.random.random())

    def reset(self) -> None:
        self.attempts = 0
