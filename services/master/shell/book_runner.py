"""Carries out what a book of copies orders: copies, and the end of those that are too many.

Invariant: every step and every order that was taken from the book is answered exactly once, also when its call fails or
is cut off.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from typing import Protocol

from prometheus_client import Counter

from mooncache import errors
from mooncache.master.core.repair_types import RepairStep, TrimOrder
from mooncache.master.core.trimming import Trim
from mooncache.master.shell.copy_call import copy_blocks
from mooncache.master.shell.trimming import Trimming
from mooncache.master.state import MasterState
from mooncache.runtime.tasks import cancel_all


class CopyBook(Protocol):
    """What plans copies, and hears how they went."""

    def on_step(self, step_id: int, codes: Sequence[int], copied_bytes: int, now_s: float) -> None: ...

    def on_trimmed(self, order: TrimOrder, codes: Sequence[int], dropped: int) -> None: ...


class BookRunner:
    """Runs steps beside each other; the book bounds how many."""

    def __init__(self, state: MasterState, blocks: Counter, copied_bytes: Counter, dropped: Counter) -> None:
        """blocks: copies by code."""
        self._state, self._blocks, self._bytes, self._dropped = state, blocks, copied_bytes, dropped
        self._calls: set[asyncio.Task[None]] = set()

    def start(self, book: CopyBook, orders: Iterable[RepairStep | TrimOrder]) -> None:
        """Carry these out; they belong to the term of now."""
        term = self._state.membership.term
        for order in orders:
            call = asyncio.create_task(self._carry_out(book, order, term))
            self._calls.add(call)
            call.add_done_callback(self._calls.discard)

    async def stop(self) -> None:
        """Cut off what is under way."""
        await cancel_all(self._calls)

    async def _carry_out(self, book: CopyBook, order: RepairStep | TrimOrder, term: int) -> None:
        if isinstance(order, RepairStep):
            await self._copy(book, order, term)
        else:
            await self._trim(book, order, term)

    async def _copy(self, book: CopyBook, step: RepairStep, term: int) -> None:
        state = self._state
        codes: Sequence[int] = [errors.Cancelled.code] * len(step.keys)
        copied_bytes = 0
        try:
            codes, copied_bytes = await copy_blocks(state, step, term)
            if len(codes) != len(step.keys):
                codes = [errors.ProtocolError.code] * len(step.keys)
        except errors.MooncacheError as error:
            codes = [error.code] * len(step.keys)
        finally:
            for code in set(codes):
                self._blocks.labels(errors.code_name(code)).inc(codes.count(code))
            self._bytes.inc(copied_bytes)
            book.on_step(step.step_id, codes, copied_bytes, state.clock.now_s())

    async def _trim(self, book: CopyBook, order: TrimOrder, term: int) -> None:
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
            self._dropped.inc(dropped)
            book.on_trimmed(order, codes if done else [errors.Cancelled.code] * len(codes), dropped)

    def _require_term(self, term: int) -> None:
        self._state.require_leading()
        if self._state.membership.term != term:
            raise errors.NotLeader("the term in which the order was given is over")
