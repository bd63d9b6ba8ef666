"""How long a step that computes nothing may wait for the pool.

Idea: while every request waits for the pool, vLLM takes one empty step after the other, and each costs a millisecond
or more of a core. So an empty step waits, woken by what it waits for: at first as briefly as a new request can bear,
then for a small share of the time that was waited already, up to a limit. What is short stays fast, what is long costs
little, and a new request is held up by no more than that share.
"""

from __future__ import annotations

from dataclasses import dataclass

FIRST_S = 0.002
SHARE = 0.02
MAX_S = 0.02


@dataclass(slots=True)
class IdleWait:
    """How long an empty step may wait for the pool."""

    since_s: float | None = None

    def next_s(self, now_s: float, *, waiting: bool) -> float:
        """Seconds to wait in this step; 0 when it computes something or nothing is under way."""
        if not waiting:
            self.since_s = None
            return 0.0
        if self.since_s is None:
            self.since_s = now_s
        return min(MAX_S, max(FIRST_S, SHARE * (now_s - self.since_s)))
