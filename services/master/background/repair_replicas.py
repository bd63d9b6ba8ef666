"""Duty: carry out what the repair plans: copies that are missing, and the end of those that are too many.

Invariant: every step and every order that was taken from the book is answered exactly once, also when its call fails or
is cut off.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from mooncache import errors
from mooncache.master.core.repair import RepairBook
from mooncache.master.core.repair_types import RepairState, RepairStep, TrimOrder
from mooncache.master.core.trimming import Trim
from mooncache.master.shell.copy_call import copy_blocks
from mooncache.master.shell.trimming import Trimming
from mooncache.master.state import MasterState
from mooncache.runtime.logs import Event, get_logger
from mooncache.runtime.tasks import cancel_all

_LOGGED = {
    RepairState.WAITING: Event.REPAIR_WAITING,
    RepairState.REPAIRING: Event.REPAIR_STARTED,
    RepairState.BLOCKED: Event.REPAIR_BLOCKED,
    RepairState.WHOLE: Event.REPAIR_FINISHED,
}

log = get_logger(__name__)


class RepairRunner:
    """Runs steps beside each other; the book bounds how many."""

    def __init__(self, state: MasterState) -> None:
        self._state = state
        self._calls: set[asyncio.Task[None]] = set()
        self._shown = RepairState.OFF

    async def run_once(self) -> None:
        """Plan and start what may be started now."""
        state, term = self._state, self._state.membership.term
        for effect in state.repair.tick(state, state.clock.now_s()):
            work = self._copy if isinstance(effect, RepairStep) else self._trim
            call = asyncio.create_task(work(state.repair, effect, term))  # type: ignore[arg-type]
            self._calls.add(call)
            call.add_done_callback(self._calls.discard)
        self._say()

    async def stop(self) -> None:
        """Cut off what is under way."""
        await cancel_all(self._calls)

    async def _copy(self, book: RepairBook, step: RepairStep, term: int) -> None:
        state = self._state
        codes: Sequence[int] = [errors.Cancelled.code] * len(step.keys)
        copied_bytes = 0
        try:
            codes, copied_bytes = await copy_blocks(state, step, term, spare=False)
            if len(codes) != len(step.keys):
                codes = [errors.ProtocolError.code] * len(step.keys)
        except errors.MooncacheError as error:
            codes = [error.code] * len(step.keys)
        finally:
            for code in set(codes):
                state.instruments.repaired.labels(errors.code_name(code)).inc(codes.count(code))
            state.instruments.repaired_bytes.inc(copied_bytes)
            book.on_step(step.step_id, codes, copied_bytes, state.clock.now_s())

    async def _trim(self, book: RepairBook, order: TrimOrder, term: int) -> None:
        state = self._state
        tenant = state.ledger.names.get(order.tenant_id, "")
        codes = [errors.OK] * len(order.keys)
        deadline_s = state.clock.now_s() + state.limits.copy_timeout_s
        trims = [
            Trim(position, stay, (go,))
            for position, (stay, go) in enumerate(zip(order.stay, order.go, strict=True))
        ]
        dropped, done = 0, False
        try:
            async with state.trimming:
                self._require_term(term)
                work = Trimming(state, tenant, order.tenant_id, order.keys, codes, deadline_s, spare=False)
                await work.confirm(trims)
                self._require_term(term)
                dropped = await work.drop(work.confirmed(trims))
            done = True
        except errors.NotLeader:
            pass  # the next leader sees for itself
        finally:
            state.instruments.trimmed.inc(dropped)
            book.on_trimmed(order, codes if done else [errors.Cancelled.code] * len(codes), dropped)

    def _require_term(self, term: int) -> None:
        self._state.require_leading()
        if self._state.membership.term != term:
            raise errors.NotLeader("the term in which the order was given is over")

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
