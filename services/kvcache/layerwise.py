"""Saving blocks layer by layer while the engine computes the next layer.

Idea: a block is reserved in the pool when its first layer is done, each layer's ranges are written as they come, and
the commit follows the last one. No reader sees the block before that. Layers for which the engine's hook did not fire
are written at the end, so the result is the same whether hooks fire or not. One thread does it in order; its queue is
bounded by the bytes of the blocks in it.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from mooncache.errors import AlreadyExists, DeadlineExceeded, MooncacheError
from mooncache.kvcache.memory import HostMemory
from mooncache.kvcache.pool_link import Call, PoolLink
from mooncache.kvcache.transfers import MoveFailure, SaveReport, TransferJob, reason_of

if TYPE_CHECKING:
    from mooncache.client.reservation import Reservation


@dataclass(slots=True)
class _LayeredSave:
    job: TransferJob
    started_s: float
    size_bytes: int
    deadline_s: float = 0.0
    begun: bool = False
    written: set[int] = field(default_factory=set)
    reservations: dict[int, Reservation] = field(default_factory=dict)
    stored: list[int] = field(default_factory=list)
    present: int = 0
    moved: int = 0
    lost: dict[MoveFailure, int] = field(default_factory=dict)

    def left_s(self) -> float:
        """Time left for what is being done. Raises DeadlineExceeded."""
        left_s = self.deadline_s - time.monotonic()
        if left_s <= 0:
            raise DeadlineExceeded("a node takes too long for the layers of a step's blocks")
        return left_s

    def lose(self, index: int, reason: MoveFailure) -> None:
        """Give one block up."""
        self.lost[reason] = self.lost.get(reason, 0) + 1
        reservation = self.reservations.pop(index, None)
        if reservation is not None:
            reservation.abort()


class LayerSaver:
    """Saves blocks layer by layer. `report` is called on the saver's thread with each ended save."""

    def __init__(
        self,
        link: PoolLink,
        memory: HostMemory,
        layers: Sequence[str],
        report: Callable[[SaveReport], None],
        *,
        timeout_s: float,
        queue_bytes_max: int,
    ) -> None:
        self._link = link
        self._memory = memory
        self._index = {name: index for index, name in enumerate(layers)}
        self._offsets = [sum(memory.layer_bytes[:index]) for index in range(len(layers))]
        self._report = report
        self._timeout_s = timeout_s
        self._queue_bytes_max = queue_bytes_max
        self._lock = threading.Condition()
        self._tasks: deque[tuple[_LayeredSave, int | None]] = deque()
        self._open: dict[str, _LayeredSave] = {}
        self._bytes = 0
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="mooncache-layers", daemon=True)
        self._thread.start()

    def layer_done(self, jobs: Sequence[TransferJob], layer: str) -> None:
        """The layer's part of these jobs' blocks no longer changes."""
        index = self._index.get(layer)
        if index is None:
            return
        with self._lock:
            for job in jobs:
                state = self._enter(job)
                if state is not None:
                    self._tasks.append((state, index))
            self._lock.notify()

    def finish(self, job: TransferJob) -> None:
        """All layers of the job's blocks are computed: write what is missing and commit."""
        with self._lock:
            state = self._enter(job)
            if state is not None:
                self._tasks.append((state, None))
                self._lock.notify()
        if state is None:
            self._report(SaveReport(job.name, (), 0, 0, 0.0, {MoveFailure.FULL: len(job.keys)}))

    def wait_saved(self, timeout_s: float) -> bool:
        """Wait until no save is under way; False when that took too long."""
        with self._lock:
            return self._lock.wait_for(lambda: self._bytes == 0, timeout_s)

    def close(self, timeout_s: float = 5.0) -> None:
        """Give up what is open and end the thread."""
        with self._lock:
            self._closed = True
            self._lock.notify()
        self._thread.join(timeout_s)

    def _enter(self, job: TransferJob) -> _LayeredSave | None:
        state = self._open.get(job.name)
        if state is None:
            size = len(job.blocks) * self._memory.block_bytes
            if self._closed or self._bytes + size > self._queue_bytes_max:
                return None
            state = self._open[job.name] = _LayeredSave(job, time.monotonic(), size)
            self._bytes += size
        return state

    # --- the thread ------------------------------------------------------------------------------------------

    def _run(self) -> None:
        while True:
            with self._lock:
                while not self._tasks and not self._closed:
                    self._lock.wait()
                if self._closed:
                    states = list(self._open.values())
                    break
                state, layer = self._tasks.popleft()
            # One limit for all blocks of a layer: a node that hangs would else take its time for each of them.
            state.deadline_s = time.monotonic() + self._timeout_s
            try:
                self._begin(state)
                if layer is None:
                    for missing in range(len(self._offsets)):
                        self._write(state, missing)
                    self._commit(state)
                else:
                    self._write(state, layer)
            except Exception as error:  # noqa: BLE001  (a defect must not end the thread: blocks would stay pinned)
                self._link.failed(Call.SAVE, error)
                self._give_up(state, MoveFailure.UNAVAILABLE)
            finally:
                if layer is None:
                    self._end(state)
        for state in states:
            self._give_up(state, MoveFailure.CANCELLED)
            self._end(state)

    @staticmethod
    def _give_up(state: _LayeredSave, reason: MoveFailure) -> None:
        """Nothing more is written or committed of this save."""
        state.begun = True
        for index in list(state.reservations):
            with contextlib.suppress(Exception):
                state.lose(index, reason)

    def _begin(self, state: _LayeredSave) -> None:
        """Reserve the blocks that the pool does not hold."""
        if state.begun:
            return
        state.begun = True
        keys = state.job.keys
        client = self._link.client()
        if client is None:
            state.lost[MoveFailure.ABSENT] = len(keys)
            return
        try:
            there = client.exists_many(list(keys), timeout_s=state.left_s())
        except MooncacheError as error:
            self._link.failed(Call.SAVE, error)
            state.lost[reason_of(error.code)] = len(keys)
            return
        for index, known in enumerate(there):
            if known:
                self._is_there(state, index)
                continue
            try:
                state.reservations[index] = client.reserve(
                    keys[index], self._memory.block_bytes, timeout_s=state.left_s()
                )
            except AlreadyExists:
                self._is_there(state, index)
            except MooncacheError as error:
                state.lose(index, reason_of(error.code))

    @staticmethod
    def _is_there(state: _LayeredSave, index: int) -> None:
        state.present += 1
        state.stored.append(index)

    def _write(self, state: _LayeredSave, layer: int) -> None:
        if layer in state.written:
            return
        state.written.add(layer)
        for index, reservation in list(state.reservations.items()):
            slices = self._memory.layer_slices(layer, state.job.blocks[index])
            try:
                reservation.write(self._offsets[layer], slices, timeout_s=state.left_s())
            except MooncacheError as error:
                state.lose(index, reason_of(error.code))

    def _commit(self, state: _LayeredSave) -> None:
        for index, reservation in list(state.reservations.items()):
            try:
                reservation.commit(timeout_s=state.left_s())
            except AlreadyExists:
                self._is_there(state, index)
            except MooncacheError as error:
                state.lose(index, reason_of(error.code))
            else:
                state.stored.append(index)
                state.moved += self._memory.block_bytes
        state.reservations.clear()

    def _end(self, state: _LayeredSave) -> None:
        seconds = time.monotonic() - state.started_s
        with self._lock:
            self._open.pop(state.job.name, None)
            self._bytes -= state.size_bytes
            self._lock.notify_all()
        stored = tuple(sorted(state.stored))
        self._report(
            SaveReport(state.job.name, stored, state.present, state.moved, seconds, dict(state.lost))
        )
