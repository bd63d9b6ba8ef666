"""Runs batches: some at a time, each request when the conductor finds something idle, until all have their answers.

At the end of the process they stop where they are. The next process goes on: what is in `ID.done` is not done again.
"""

from __future__ import annotations

import asyncio
from collections import deque
from typing import Any, Final

import msgspec

from mooncache.gateway.core.batch import (
    ERRORS_MAX,
    BatchStatus,
    BatchUsage,
    OfflineBatch,
    next_batch,
)
from mooncache.gateway.endpoints.offline import AGAIN, LATER, OfflineAnswer, ask, streamed
from mooncache.gateway.shell.batch_index import BatchIndex, Placed, index_of, line_at
from mooncache.gateway.shell.batch_store import BatchStore, DoneLine, new_id
from mooncache.gateway.shell.offline_exchange import OfflineExchange
from mooncache.gateway.state import GatewayState
from mooncache.runtime.logs import Event, get_logger
from mooncache.runtime.tasks import cancel_all, wait_for_event

RUNNING_MAX: Final = 8
_OFFERED_MAX: Final = 2  # of a batch: the next one is read and tokenised while the first waits
_TRIES_MAX: Final = 3
_AGAIN_S: Final = 1.0
_DISK_S: Final = 10.0  # after a disk was full
_LOOK_S: Final = 30.0
_SAVE_EVERY: Final = 64  # requests; a restart counts them from ID.done

log = get_logger(__name__)


async def run(state: GatewayState) -> None:
    """Run batches until cancelled."""
    store = state.batches
    if store is None:
        return
    slots, freed, indexing = (
        asyncio.Semaphore(state.config.gateway.offline_request_count_max),
        asyncio.Event(),
        asyncio.Lock(),
    )
    running: dict[asyncio.Task[None], _BatchRun] = {}
    try:
        while True:
            store.changed.clear()
            for task in [task for task in running if task.done()]:
                _report(running.pop(task).batch, task)
            while len(running) < RUNNING_MAX and not state.draining:
                batch = next_batch(list(store.batches.values()), [each.batch for each in running.values()])
                if batch is None:
                    break
                begun = _BatchRun(state, store, batch, slots, freed, indexing)
                task = asyncio.create_task(begun.run(), name=batch.id)
                task.add_done_callback(lambda _: store.changed.set())
                running[task] = begun
            for each in running.values():
                if each.batch.status is BatchStatus.CANCELLING:
                    each.cancel()
            state.stats.batches_open.set(len(running))
            await wait_for_event(store.changed, _LOOK_S)
    finally:
        await cancel_all(running)


def _report(batch: OfflineBatch, task: asyncio.Task[None]) -> None:
    error = None if task.cancelled() else task.exception()
    if error is not None:
        log.error(Event.BATCH_STOPPED, batch_id=batch.id, error=repr(error), exc_info=error)


class _BatchRun:
    """One batch under way. `run` is the whole interface, and `cancel` for its owner's wish."""

    def __init__(
        self,
        state: GatewayState,
        store: BatchStore,
        batch: OfflineBatch,
        slots: asyncio.Semaphore,
        freed: asyncio.Event,
        indexing: asyncio.Lock,
    ) -> None:
        self.batch = batch
        self._state, self._store = state, store
        self._slots, self._freed, self._indexing = slots, freed, indexing
        self._work: asyncio.Task[None] | None = None
        self._done: set[int] = set()

    def cancel(self) -> None:
        """Send nothing further, and give up what is under way."""
        if self._work is not None:
            self._work.cancel()

    async def run(self) -> None:
        """From its file to its results. A disk that is full holds it up."""
        while True:
            try:
                return await self._run()
            except OSError as error:
                log.error(Event.BATCH_STOPPED, batch_id=self.batch.id, error=repr(error))
                await self._state.clock.sleep(_DISK_S)

    async def _run(self) -> None:
        batch, store = self.batch, self._store
        most = self._state.config.gateway.batch_request_count_max
        async with self._indexing:  # one at a time: the prompts of a file are in memory meanwhile
            index = await asyncio.to_thread(index_of, store, batch, most)
        await self._resume(index)
        if index.fault is not None:
            batch.errors.insert(0, index.fault)
            await self._end(BatchStatus.FAILED)
            return
        end = BatchStatus.COMPLETED
        if batch.status is BatchStatus.VALIDATING:
            batch.move(BatchStatus.IN_PROGRESS, self._wall_s())
            await asyncio.to_thread(store.save, batch)
        if batch.status is BatchStatus.IN_PROGRESS:
            await self._send(index)
        if batch.status is BatchStatus.CANCELLING:
            end = BatchStatus.CANCELLED
            await self._give_up(index, "batch_cancelled", "The batch was cancelled before it was sent.")
        elif len(self._done) < len(index.order) + len(index.bad):
            end = BatchStatus.EXPIRED
            await self._give_up(index, "batch_expired", "The completion window ended before it was sent.")
        if end is BatchStatus.COMPLETED:
            batch.move(BatchStatus.FINALIZING, self._wall_s())
        await self._end(end)

    async def _resume(self, index: BatchIndex) -> None:
        """Count what was done before, and the lines that are no requests."""
        batch = self.batch
        batch.total, batch.completed, batch.failed = len(index.order) + len(index.bad), 0, 0
        batch.errors = [each.fault for each in index.bad[:ERRORS_MAX]]
        batch.usage = BatchUsage()
        self._done = set()
        for done in await asyncio.to_thread(list, self._store.done(batch.id)):
            self._count(done)
        for bad in index.bad:
            if bad.fault.line is not None and bad.fault.line not in self._done:
                await self._note_fault(bad.fault.line, bad.custom_id, bad.fault.code, bad.fault.message)

    async def _send(self, index: BatchIndex) -> None:
        """Send what is left within the window."""
        left_s = self.batch.expires_at - self._wall_s()
        self._work = work = asyncio.create_task(self._send_all(index.order))
        try:
            if left_s > 0:
                await asyncio.wait({work}, timeout=left_s)
        finally:
            await cancel_all([work])
            self._work = None
        if not work.cancelled() and (error := work.exception()) is not None:
            raise error

    async def _send_all(self, order: list[Placed]) -> None:
        """A few are offered to the conductor; those that it admitted are under way at the same time."""
        under_way: set[asyncio.Task[None]] = set()
        offered: deque[asyncio.Event] = deque()
        try:
            for placed in order:
                if placed.number in self._done:
                    continue
                await self._slots.acquire()
                admitted = asyncio.Event()
                task = asyncio.create_task(self._one(placed, admitted))
                under_way.add(task)
                task.add_done_callback(self._released)
                offered.append(admitted)
                if len(offered) >= _OFFERED_MAX:
                    await offered.popleft().wait()
                for ended in [each for each in under_way if each.done()]:
                    under_way.remove(ended)
                    ended.result()
            await asyncio.gather(*under_way)
        finally:
            await cancel_all(under_way)

    def _released(self, _: asyncio.Task[None]) -> None:
        self._slots.release()
        self._freed.set()

    async def _one(self, placed: Placed, admitted: asyncio.Event) -> None:
        """One request, until it has an answer or will have none. Raises OSError."""
        stats, batch = self._state.stats, self.batch
        try:
            line = await asyncio.to_thread(line_at, self._store, batch, placed)
            request_id = f"{batch.id}-{placed.number}"
            stats.offline_open.inc()
            try:
                answer = await self._answered(streamed(line), request_id, admitted)
            finally:
                stats.offline_open.dec()
            usage = answer.usage
            for kind, count in msgspec.structs.asdict(usage).items():
                stats.offline_tokens.labels(kind.removesuffix("_tokens")).inc(count)
            response = {"status_code": answer.status, "request_id": request_id, "body": answer.body}
            await self._note(
                placed.number, answer.fault is None, usage, _entry(line.custom_id, response=response)
            )
        finally:
            admitted.set()

    async def _answered(self, body: bytes, request_id: str, admitted: asyncio.Event) -> OfflineAnswer:
        batch, tries, keyring = self.batch, 0, self._state.keyring
        while True:
            limits, key_limits = keyring.limits_of(batch.tenant, batch.key_id)
            exchange = OfflineExchange(
                batch.endpoint,
                body,
                tenant=batch.tenant,
                admin=batch.admin,
                key_id=batch.key_id,
                request_id=request_id,
                started_s=self._state.clock.now_s(),
                freed=self._freed,
                budget=limits.money_per_month,
                key_budget=key_limits.money_per_month,
                priority=keyring.priority_of(batch.tenant, batch.key_id),
            )
            exchange.admitted = admitted
            answer = await ask(self._state, exchange, chat=batch.endpoint.endswith("/chat/completions"))
            name = answer.fault.name if answer.fault is not None else ""
            if name in AGAIN:
                tries += 1
            if name not in LATER and (name not in AGAIN or tries >= _TRIES_MAX):
                return answer
            await self._state.clock.sleep(_AGAIN_S)

    async def _give_up(self, index: BatchIndex, code: str, text: str) -> None:
        for placed in index.order:
            if placed.number not in self._done:
                line = await asyncio.to_thread(line_at, self._store, self.batch, placed)
                await self._note_fault(placed.number, line.custom_id, code, text)

    async def _note_fault(self, number: int, custom_id: str | None, code: str, text: str) -> None:
        entry = _entry(custom_id, error={"code": code, "message": text})
        await self._note(number, False, BatchUsage(), entry)

    async def _note(self, number: int, answered: bool, usage: BatchUsage, entry: dict[str, Any]) -> None:
        done = DoneLine(number, answered, usage, msgspec.Raw(msgspec.json.encode(entry)))
        await asyncio.shield(asyncio.to_thread(self._store.add_done, self.batch.id, done))
        self._count(done)
        self._state.stats.batch_requests.labels("answered" if answered else "failed").inc()
        if len(self._done) % _SAVE_EVERY == 0:
            await asyncio.to_thread(self._store.save, self.batch)

    def _count(self, done: DoneLine) -> None:
        batch = self.batch
        if done.number in self._done:
            return
        self._done.add(done.number)
        batch.completed += done.answered
        batch.failed += not done.answered
        batch.usage.add(done.usage)

    async def _end(self, status: BatchStatus) -> None:
        batch, wall_s = self.batch, self._wall_s()
        expires_at = int(wall_s + self._state.config.gateway.batch_age_max_s)
        if batch.output_file_id is None and batch.error_file_id is None:
            await asyncio.to_thread(self._store.write_results, batch, int(wall_s), expires_at)
        batch.move(status, wall_s)
        await asyncio.to_thread(self._store.save, batch)
        self._state.stats.batches.labels(status).inc()
        log.info(
            Event.BATCH_ENDED,
            batch_id=batch.id,
            tenant=batch.tenant,
            status=status,
            completed=batch.completed,
            failed=batch.failed,
            elapsed_s=round(wall_s - batch.created_at, 3),
        )

    def _wall_s(self) -> float:
        return self._state.clock.wall_s()


def _entry(
    custom_id: str | None, *, response: dict[str, Any] | None = None, error: dict[str, str] | None = None
) -> dict[str, Any]:
    """A line of a result file."""
    return {"id": new_id("batch_req_"), "custom_id": custom_id, "response": response, "error": error}
