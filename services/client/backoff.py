"""Waiting time between attempts: doubles up to a cap, with full jitter so that many nodes do not return at once."""

from __future__ import annotations

import random
from dataclasses import dataclass


@dataclass(slots=True)
class Backoff:
    """`next_s` gives the next wait in seconds; `reset` after a success."""

    random: random.Random
    first_s: float = 0.05
    cap_s: float = 2.0
    attempts: int = 0

    def next_s(self) -> float:
        """A wait between half of the current step and the whole of it."""
        step_s = min(self.cap_s, self.first_s * (1 << min(self.attempts, 20)))
        self.attempts += 1
        return step_s * (0.5 + 0.5 * self.random.random())

    def reset(self) -> None:
        self.attempts = 0
