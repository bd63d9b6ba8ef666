"""Saving blocks layer by layer while the engine computes the next layer.

Idea: the blocks of a step are reserved in the pool when their first layer is done (those for one node together), each
layer of all of them is written in one call as it comes, and one commit follows the last one. No reader sees a block
before that. Layers for which the engine's hook did not fire are written at the end, so the result is the same whether
hooks fire or not. What is lost of one block costs that block only. One thread does it in order; its queue is bounded by
the bytes of the blocks in it.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from mooncache.errors import OK, AlreadyExists, DeadlineExceeded, MooncacheError
from mooncache.kvcache.memory import Fence, LayerMemory, staged_of
from mooncache.kvcache.pool_link import Call, PoolClient, PoolLink
from mooncache.kvcache.transfers import MoveFailure, SaveReport, TransferJob, reason_of

if TYPE_CHECKING:
    from mooncache.client.reservation import ReservationBatch


@dataclass(slots=True)
class _JobSave:
    """What has become of one request's blocks."""

    job: TransferJob
    size_bytes: int
    stored: list[int] = field(default_factory=list)
    present: int = 0
    moved: int = 0
    lost: dict[MoveFailure, int] = field(default_factory=dict)

    def lose(self, reason: MoveFailure) -> None:
        """Give one block up."""
        self.lost[reason] = self.lost.get(reason, 0) + 1

    def is_there(self, index: int) -> None:
        """The pool held the block before."""
        self.present += 1
        self.stored.append(index)


@dataclass(slots=True)
class _StepSave:
    """The blocks that one step of the engine completes, of those that one node should take."""

    started_s: float
    node: str
    session_token: str = field(default="", repr=False)
    saves: list[_JobSave] = field(default_factory=list)
    unfinished: set[str] = field(default_factory=set)
    deadline_s: float = 0.0
    begun: bool = False
    written: set[int] = field(default_factory=set)
    staged_bytes: int = 0
    batch: ReservationBatch | None = None
    reserved: list[tuple[_JobSave, int]] = field(default_factory=list)
    """The blocks to be written, as in `blocks`; in `batch` they have the same positions."""
    places: list[int] = field(default_factory=list)
    """Where they are in the engine's memory."""
    open: set[int] = field(default_factory=set)
    """Positions in `reserved` that are not lost."""

    def left_s(self) -> float:
        """Time left for what is being done. Raises DeadlineExceeded."""
        left_s = self.deadline_s - time.monotonic()
        if left_s <= 0:
            raise DeadlineExceeded("a node takes too long for the layers of a step's blocks")
        return left_s

    def blocks(self) -> list[tuple[_JobSave, int]]:
        """Of all jobs: whose it is, and its index there."""
        return [(save, index) for save in self.saves for index in range(len(save.job.keys))]

    def open_all(self, blocks: list[tuple[_JobSave, int]]) -> None:
        """These are to be written."""
        self.reserved = blocks
        self.places = [save.job.blocks[index] for save, index in blocks]
        self.open = set(range(len(blocks)))

    def lose(self, positions: Iterable[int], reason: MoveFailure) -> None:
        """Give blocks up that were open."""
        for position in list(positions):
            self.open.discard(position)
            self.reserved[position][0].lose(reason)


@dataclass(frozen=True, slots=True)
class _Task:
    """What the engine has said of a step: a layer is computed, or (None) all of them are."""

    step: _StepSave
    layer: int | None
    fence: Fence | None


class LayerSaver:
    """Saves blocks layer by layer. `report` is called on the saver's thread with each ended save."""

    def __init__(
        self,
        link: PoolLink,
        memory: LayerMemory,
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
        self._tasks: deque[_Task] = deque()
        self._open: dict[str, _StepSave] = {}
        self._bytes = 0
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="mooncache-layers", daemon=True)
        self._thread.start()

    def layer_done(self, jobs: Sequence[TransferJob], layer: str) -> None:
        """The layer's part of these jobs' blocks no longer changes. They are what one step completes."""
        index = self._index.get(layer)
        if index is None:
            return
        fence = self._memory.fence()
        with self._lock:
            for step in self._enter(jobs):
                self._tasks.append(_Task(step, index, fence))
            self._lock.notify()

    def finish(self, *jobs: TransferJob) -> None:
        """All layers of the jobs' blocks are computed: write what is missing and commit.

        A step's jobs are committed together, when the last of them is finished.
        """
        fence = self._memory.fence()
        with self._lock:
            for step in self._enter(jobs):
                ended = step.unfinished.intersection(job.name for job in jobs)
                step.unfinished -= ended
                if ended and not step.unfinished:
                    self._tasks.append(_Task(step, None, fence))
            refused = [job for job in jobs if job.name not in self._open]
            self._lock.notify()
        for job in refused:
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

    def _enter(self, jobs: Sequence[TransferJob]) -> list[_StepSave]:
        """The steps that these jobs belong to: one for the new ones of each node and tenant; none without room."""
        new: dict[tuple[str, str], _StepSave] = {}
        for job in jobs:
            if self._closed or job.name in self._open:
                continue
            size = len(job.blocks) * self._memory.block_bytes
            if self._bytes + size <= self._queue_bytes_max:
                whose = job.node, job.session_token
                step = new.setdefault(whose, _StepSave(time.monotonic(), *whose))
                step.saves.append(_JobSave(job, size))
                step.unfinished.add(job.name)
                self._open[job.name] = step
                self._bytes += size
        known = [self._open[job.name] for job in jobs if job.name in self._open]
        return list({id(step): step for step in known}.values())

    # --- the thread ------------------------------------------------------------------------------------------

    def _run(self) -> None:
        while True:
            with self._lock:
                while not self._tasks and not self._closed:
                    self._lock.wait()
                if self._closed:
                    steps = {id(step): step for step in self._open.values()}
                    break
                task = self._tasks.popleft()
            step, layer = task.step, task.layer
            # One limit for all blocks of a layer: a node that hangs would else take its time for each of them.
            step.deadline_s = time.monotonic() + self._timeout_s
            try:
                self._begin(step)
                if layer is None:
                    for missing in range(len(self._offsets)):
                        self._write(step, missing, task.fence)
                    self._commit(step)
                else:
                    self._write(step, layer, task.fence)
            except Exception as error:  # noqa: BLE001  (a defect must not end the thread: blocks would stay pinned)
                self._link.failed(Call.SAVE, error)
                self._give_up(step, MoveFailure.UNAVAILABLE)
            finally:
                if layer is None:
                    self._end(step)
        for step in steps.values():
            self._give_up(step, MoveFailure.CANCELLED)
            self._end(step)

    @staticmethod
    def _give_up(step: _StepSave, reason: MoveFailure) -> None:
        """Nothing more is written or committed of this step."""
        if not step.begun:
            step.open_all(step.blocks())
        step.begun = True
        step.lose(step.open, reason)
        if step.batch is not None:
            with contextlib.suppress(Exception):
                step.batch.abort()
        step.batch = None

    def _begin(self, step: _StepSave) -> None:
        """Reserve the blocks that the pool does not hold."""
        if step.begun:
            return
        step.begun = True
        step.open_all(step.blocks())
        client = self._link.client(step.session_token)
        if client is None:
            step.lose(step.open, MoveFailure.ABSENT)
            return
        try:
            step.open_all(self._absent(client, step))
            if step.open:
                keys = [save.job.keys[index] for save, index in step.reserved]
                step.batch = client.reserve_many(
                    keys, self._memory.block_bytes, prefer_node=step.node or None, timeout_s=step.left_s()
                )
        except MooncacheError as error:
            self._link.failed(Call.SAVE, error)
            step.lose(step.open, reason_of(error.code))
            return
        if step.batch is not None:
            self._note(step, step.batch.codes)

    @staticmethod
    def _absent(client: PoolClient, step: _StepSave) -> list[tuple[_JobSave, int]]:
        keys = [save.job.keys[index] for save, index in step.reserved]
        there = client.exists_many(keys, timeout_s=step.left_s())
        absent = []
        for (save, index), known in zip(step.reserved, there, strict=True):
            if known:
                save.is_there(index)
            else:
                absent.append((save, index))
        return absent

    @staticmethod
    def _note(step: _StepSave, codes: Sequence[int]) -> None:
        """Blocks with another code than OK are no longer open."""
        if not any(codes):  # OK is 0, and all blocks mostly have it: looked at in one go, for each layer
            return
        for position in [position for position in step.open if codes[position] != OK]:
            if codes[position] != AlreadyExists.code:
                step.lose([position], reason_of(codes[position]))
                continue
            save, index = step.reserved[position]
            save.is_there(index)
            step.open.discard(position)

    def _write(self, step: _StepSave, layer: int, fence: Fence | None) -> None:
        if layer in step.written:
            return
        step.written.add(layer)
        if step.batch is None or not step.open:
            return
        places: Sequence[int | None] = step.places
        if len(step.open) < len(places):
            places = [place if position in step.open else None for position, place in enumerate(places)]
        try:
            with self._memory.reading_layer(layer, places, fence, step.deadline_s) as part:
                result = step.batch.write_gathered(
                    self._offsets[layer], part.source, part.places, timeout_s=step.left_s()
                )
        except MooncacheError as error:
            self._give_up(step, reason_of(error.code))
        else:
            step.staged_bytes += result.staged_bytes
            self._note(step, result.codes)

    def _commit(self, step: _StepSave) -> None:
        batch, step.batch = step.batch, None
        if batch is None or not step.open:
            return
        try:
            result = batch.commit(timeout_s=step.left_s())
        except MooncacheError as error:
            step.lose(step.open, reason_of(error.code))
            return
        self._note(step, result.codes)
        for position in step.open:
            save, index = step.reserved[position]
            if result.created[position]:
                save.stored.append(index)
                save.moved += self._memory.block_bytes
            else:
                save.is_there(index)
        if step.open:
            self._link.succeeded()

    def _end(self, step: _StepSave) -> None:
        seconds = time.monotonic() - step.started_s
        with self._lock:
            for save in step.saves:
                self._open.pop(save.job.name, None)
                self._bytes -= save.size_bytes
            self._lock.notify_all()
        moved = sum(save.moved for save in step.saves)
        for save in step.saves:
            stored = tuple(sorted(save.stored))
            # What a call staged is counted of all its blocks together: each save has its share.
            share = min(step.staged_bytes, moved) * save.moved // max(moved, 1)
            staged = staged_of(self._memory, share, save.moved)
            self._report(
                SaveReport(save.job.name, stored, save.present, save.moved, seconds, dict(save.lost), staged)
            )
