"""Duty: carry out what the repair plans: copies that are missing, and the end of those that are too many."""

from __future__ import annotations

from mooncache import errors
from mooncache.master.core.repair_types import RepairState
from mooncache.master.shell.book_runner import BookRunner
from mooncache.master.state import MasterState
from mooncache.runtime.logs import Event, get_logger

_LOGGED = {
    RepairState.WAITING: Event.REPAIR_WAITING,
    RepairState.REPAIRING: Event.REPAIR_STARTED,
    RepairState.BLOCKED: Event.REPAIR_BLOCKED,
    RepairState.WHOLE: Event.REPAIR_FINISHED,
}

log = get_logger(__name__)


class RepairRunner:
    """The repair at work."""

    def __init__(self, state: MasterState) -> None:
        known = state.instruments
        self._state = state
        self._runner = BookRunner(state, known.repaired, known.repaired_bytes, known.trimmed)
        self._shown = RepairState.OFF

    async def run_once(self) -> None:
        """Plan and start what may be started now."""
        book = self._state.repair
        self._runner.start(book, book.tick(self._state, self._state.clock.now_s()))
        self._say()

    async def stop(self) -> None:
        """Cut off what is under way."""
        await self._runner.stop()

    def _say(self) -> None:
        """A line of the log for each change of what the repair does."""
        found = self._state.repair.figures(self._state.clock.now_s())
        if found.state is RepairState.REPAIRING and not found.steps_in_flight:
            return  # a put to several nodes is short for a moment; that is no news
        if found.state is not self._shown and found.state in _LOGGED:
            log.info(
                _LOGGED[found.state],
                short_blocks=found.short_blocks,
                left_bytes=found.left_bytes,
                copied_bytes=found.copied_bytes,
                wait_s=round(found.wait_s, 1),
                code=errors.code_name(found.resting_code),
            )
        self._shown = found.state
