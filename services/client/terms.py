"""Which master counts: the one with the newest term so far.

A leader that was stopped or cut off may wake up and go on as if it still led. So what it says under an older term
counts for nothing. But terms may also go back for good: a coordination that was lost and begun anew, with a clock
behind the old one's. A stale leader falls silent within moments, because its lease ended by its own clock; the new
life of a cluster goes on answering. So an older term is taken when it was heard several times over PATIENCE_S, and
nothing newer was heard meanwhile. Commands never count as such an answer.
"""

from __future__ import annotations

from typing import Final

PATIENCE_S: Final = 15.0
REFUSALS_MIN: Final = 3


class Terms:
    """`newest` is the newest term heard, 0 before any. Times are those of one monotonic clock."""

    def __init__(self, patience_s: float = PATIENCE_S) -> None:
        self.newest = 0
        self.refusals = 0  # answers under an older term since the newest was heard last
        self._patience_s = patience_s
        self._since_s = 0.0

    def hear(self, term: int, now_s: float) -> bool:
        """A master answered as leader of `term`: whether it is the one to follow."""
        if term < self.newest:
            if self.refusals == 0:
                self._since_s = now_s
            self.refusals += 1
            if self.refusals < REFUSALS_MIN or now_s - self._since_s < self._patience_s:
                return False
        self.newest = term
        self.refusals = 0
        return True

    def obey(self, term: int) -> bool:
        """A master commands under `term`: whether to carry it out."""
        if term < self.newest:
            return False
        self.newest = term
        return True
