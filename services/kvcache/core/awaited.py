"""Waiting for blocks that another instance computes: what to do next after each answer about them.

Idea: one parked call at the node waits for all of them (WATCH). When it ends with blocks missing, the pool is asked
once more (LOOK): a block may lie elsewhere, or have come in the same moment. What is missing then is waited for again
only where there is a reason:

- A block was given up: the blocks in front of it may still come, and which one it was is not said. So the leading half
  is waited for; a single block that is given up ends the wait.
- The node cannot be reached: writers turn to other nodes, so any node may get the blocks. When the wait at all nodes
  ends so too (one of them died, or there are too many to wait at), the pool is asked again after a growing pause
  (RETRY), and waited at anew.
- The node's time limit came before the caller's own: likewise after a pause.

Invariant: a wait ends, because with each further one blocks have come, fewer are waited for, or time has passed.
"""

from __future__ import annotations

from collections.abc import Iterable
from enum import Enum, auto

from mooncache.client.results import WatchState

KEYS_MAX = 4096
"""Keys of one wait."""


PAUSE_FIRST_S, PAUSE_MAX_S = 0.02, 0.5


class NextStep(Enum):
    """What to do next."""

    WAIT = auto()  # more will be heard
    WATCH = auto()  # wait for `watched` at `node`
    LOOK = auto()  # ask the pool for `missing`
    RETRY = auto()  # look again after a pause
    DONE = auto()  # all are there
    OVER = auto()  # the others do not come


class AwaitedBlocks:
    """Blocks that are awaited, by their positions in a chain.

    Args:
        positions: which, in rising order.
        node: where they will be; "" when that is not known.
        deadline_s: until when, of the caller's clock.
    """

    def __init__(self, positions: Iterable[int], *, node: str, deadline_s: float) -> None:
        self.missing = list(positions)
        self.node = node
        self.deadline_s = deadline_s
        self.retries = 0
        self._window = KEYS_MAX
        self._ended: WatchState | None = None

    @property
    def watched(self) -> tuple[int, ...]:
        """Positions that the next wait is for."""
        return tuple(self.missing[: self._window])

    def begin(self, now_s: float) -> NextStep:
        """What comes first."""
        if not self.missing:
            return NextStep.DONE
        return NextStep.LOOK if now_s >= self.deadline_s else NextStep.WATCH

    def heard(self, came: Iterable[int], state: WatchState) -> NextStep:
        """The wait says which positions are there now, and how it goes on."""
        self._take(came)
        if not self.missing:
            return NextStep.DONE
        if state is WatchState.MORE:
            return NextStep.WAIT
        if state is WatchState.ALL:
            self._window = min(KEYS_MAX, 2 * self._window)
            return NextStep.WATCH
        if state is WatchState.GIVEN_UP and self._window < KEYS_MAX and len(self.watched) > 1:
            return self._halve()  # the pool was asked when the first one was given up
        self._ended = state
        return NextStep.LOOK

    def looked(self, came: Iterable[int], now_s: float) -> NextStep:
        """The pool says which of the missing positions it has."""
        has_gained = self._take(came)
        ended, self._ended = self._ended, None
        if not self.missing:
            return NextStep.DONE
        if now_s >= self.deadline_s:
            return NextStep.OVER
        if has_gained or ended is None:
            return NextStep.WATCH
        if ended is WatchState.GIVEN_UP:
            return self._halve() if len(self.watched) > 1 else NextStep.OVER
        if ended is WatchState.UNREACHABLE and self.node:
            self.node = ""
            return NextStep.WATCH
        self.retries += 1
        return NextStep.RETRY

    def _halve(self) -> NextStep:
        self._window = len(self.watched) // 2
        return NextStep.WATCH

    @property
    def pause_s(self) -> float:
        """How long to pause before a retry."""
        return min(PAUSE_MAX_S, PAUSE_FIRST_S * 2.0 ** min(self.retries, 16))

    def _take(self, came: Iterable[int]) -> bool:
        gone = set(came)
        before = len(self.missing)
        if gone:
            self.missing = [position for position in self.missing if position not in gone]
        return len(self.missing) < before
