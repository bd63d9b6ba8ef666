"""Duty: carry out what the rebalance plans: copies to emptier nodes, and the end of those that they replace."""

from __future__ import annotations

from mooncache.master.core.rebalance_types import RebalanceState
from mooncache.master.shell.book_runner import BookRunner
from mooncache.master.state import MasterState
from mooncache.runtime.logs import Event, get_logger

log = get_logger(__name__)


class RebalanceRunner:
    """The rebalance at work."""

    def __init__(self, state: MasterState) -> None:
        known = state.instruments
        self._state = state
        self._runner = BookRunner(state, known.rebalanced, known.rebalanced_bytes, known.moved)
        self._moving = False

    async def run_once(self) -> None:
        """Plan and start what may be started now."""
        book = self._state.rebalance
        self._runner.start(book, book.tick(self._state, self._state.clock.now_s()))
        self._say()

    async def stop(self) -> None:
        """Cut off what is under way."""
        await self._runner.stop()

    def _say(self) -> None:
        """A line of the log as a round begins, and as its last move ends."""
        found = self._state.rebalance.figures(self._state.clock.now_s())
        moving = found.state is RebalanceState.MOVING
        if moving is not self._moving:
            log.info(
                Event.REBALANCE_STARTED if moving else Event.REBALANCE_FINISHED,
                left_bytes=found.left_bytes,
                moved_bytes=found.moved_bytes,
                skipped_blocks=found.skipped_blocks,
                fullest_percent=round(found.fullest_share * 100),
                emptiest_percent=round(found.emptiest_share * 100),
            )
        self._moving = moving
