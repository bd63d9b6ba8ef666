"""Moving an engine's blocks to the pool and back, beside the engine's thread.

Idea: the engine hands over jobs (keys and block numbers) and later takes reports; in between, threads move the bytes
straight between the engine's memory and the pool. The rules that keep it safe:

- A load is reported only after the last write into its blocks, whatever became of it: also when a copy of the GPU
  outlives its time limit.
- A save is reported only after the last read of its blocks; the engine keeps them unchanged until then.
- Waiting saves are bounded in bytes; what does not fit is reported as dropped at once.
- A block counts as loaded only when the client checked its checksum and its size is exactly one block.
- A load that has to keep pace (`TransferJob.pace`) begins with small batches and ends when it falls behind: the leading
  blocks that have come count.
- A load may be streamed: blocks that another instance is computing (`TransferJob.awaited`) are loaded as they come, and
  while none is there the load holds no thread (kvcache/streams.py). Only one thread at a time works on a load.
- Blocks of a save that another instance waits for and that are lost are given up at the node, before the report.
- A report always comes, also when the pool is absent, slow or dead: no call is without a time limit.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from mooncache.client.results import WatchState
from mooncache.errors import OK, AlreadyExists, DeadlineExceeded, FewerReplicas
from mooncache.kvcache.core.break_even import FIRST_BATCH_BYTES
from mooncache.kvcache.memory import BlockMemory, Fence, InDoubt, staged_of
from mooncache.kvcache.pool_link import Call, PoolClient, PoolLink
from mooncache.kvcache.streams import Stream
from mooncache.kvcache.transfers import LoadReport, MoveFailure, SaveReport, TransferJob, code_of, reason_of
from mooncache.kvcache.watcher import Watcher
from mooncache.runtime import tracing

BATCH_BYTES = 32 << 20
GIVEN_UP_MAX = 1024
"""Jobs whose blocks wait to be given up; what others wait for beyond that ends with their time limits."""
STREAMS_MAX = 256
"""Loads that wait for blocks at a time; further ones take what is there."""
_LOOK_TIMEOUT_S = 1.0
_IS_THERE = -1  # instead of a code: the pool had the block
_TIMEOUT_MIN_S = 1e-3
LOAD_THREADS = 2  # one loads while the other copies
SAVE_THREADS = 1


def _span(name: str, job: TransferJob) -> tracing.Span:
    return tracing.span(name, kind="client", parent=job.trace, root=False, kvcache__blocks=len(job.keys))


def _is_cut(due_s: float, deadline_s: float) -> bool:
    """True when a call's time ended for the sake of the pace, before the time limit of the load."""
    return due_s < deadline_s


@dataclass(slots=True)
class _Load:
    job: TransferJob
    fence: Fence | None
    started_s: float
    span: tracing.Span
    loaded: int = 0
    cancelled: bool = False
    moving_s: float = 0.0  # of a stream so far
    staged_bytes: int = 0
    stream: Stream | None = None


@dataclass(slots=True)
class _Save:
    job: TransferJob
    fence: Fence | None
    started_s: float
    size_bytes: int
    staged_bytes: int = 0


class Mover:
    """Loads and saves blocks on its own threads. `changed` is set whenever there is a new report."""

    def __init__(
        self,
        link: PoolLink,
        memory: BlockMemory,
        *,
        load_timeout_s: float,
        save_timeout_s: float,
        save_queue_bytes_max: int,
        changed: threading.Event | None = None,
        load_threads: int = LOAD_THREADS,
        save_threads: int = SAVE_THREADS,
        watcher: Watcher | None = None,
    ) -> None:
        self._link = link
        self._watcher = watcher or Watcher(link)
        self._owns_watcher = watcher is None
        self._memory = memory
        self._load_timeout_s = load_timeout_s
        self._save_timeout_s = save_timeout_s
        self._save_queue_bytes_max = save_queue_bytes_max
        self.changed = changed or threading.Event()
        self._lock = threading.Condition()
        self._loads: deque[_Load] = deque()
        self._saves: deque[_Save] = deque()
        self._given_up: deque[TransferJob] = deque()
        self._loading: dict[str, _Load] = {}
        self._streaming = 0
        self._save_bytes = 0
        self._load_reports: list[LoadReport] = []
        self._save_reports: list[SaveReport] = []
        self._closed = False
        self._threads = [
            threading.Thread(target=self._run_loads, name=f"mooncache-load-{i}", daemon=True)
            for i in range(load_threads)
        ] + [
            threading.Thread(target=self._run_saves, name=f"mooncache-save-{i}", daemon=True)
            for i in range(save_threads)
        ]
        for thread in self._threads:
            thread.start()

    # --- the engine's side -----------------------------------------------------------------------------------

    def load(self, job: TransferJob) -> None:
        """Begin to fill the job's blocks."""
        now_s = time.monotonic()
        load = _Load(job, self._memory.fence(), now_s, _span("kvcache.load", job))
        with self._lock:
            self._loading[job.name] = load
            if job.awaited:
                await_s = job.await_s if self._streaming < STREAMS_MAX else 0.0
                self._streaming += 1
                load.stream = self._stream(load, now_s + await_s)
                load.stream.begin(now_s)
            self._loads.append(load)
            self._lock.notify_all()

    def _stream(self, load: _Load, deadline_s: float) -> Stream:
        def heard(positions: Sequence[int], state: WatchState) -> None:
            with self._lock:
                stream.heard(positions, state, time.monotonic())
                self._unpark(load)

        def retry() -> None:
            with self._lock:
                stream.must_look = stream.ended_s is None
                self._unpark(load)

        stream = Stream(self._watcher, load.job, deadline_s, heard, retry)
        return stream

    def _unpark(self, load: _Load) -> None:
        """Let a thread go on with a stream that has something to do."""
        stream = load.stream
        if stream is not None and stream.is_parked and self._has_work(load, stream):
            stream.is_parked = False
            self._loads.append(load)
            self._lock.notify_all()

    @staticmethod
    def _has_work(load: _Load, stream: Stream) -> bool:
        ended = stream.ended_s is not None
        return load.cancelled or ended or stream.must_look or stream.ready > load.loaded

    def cancel(self, name: str) -> None:
        """End a load early: what has not begun does not begin. The report comes as always."""
        with self._lock:
            load = self._loading.get(name)
            if load is not None:
                load.cancelled = True
                self._unpark(load)

    def save(self, job: TransferJob) -> None:
        """Begin to save the job's blocks; they must not change until the report."""
        size_bytes = self._memory.bytes_of(job.blocks)
        with self._lock:
            fits = self._save_bytes + size_bytes <= self._save_queue_bytes_max and not self._closed
            if fits:
                self._save_bytes += size_bytes
                save = _Save(job, self._memory.fence(), time.monotonic(), size_bytes)
                self._saves.append(save)
                self._lock.notify_all()
            else:
                self._save_reports.append(
                    SaveReport(job.name, (), 0, 0, 0.0, {MoveFailure.FULL: len(job.keys)})
                )
        if not fits:
            self.give_up(job)
            self.changed.set()

    def give_up(self, job: TransferJob) -> None:
        """These blocks will not be saved: waits of other instances for them end. Does not wait."""
        with self._lock:
            if job.is_awaited and job.keys and not self._closed and len(self._given_up) < GIVEN_UP_MAX:
                self._given_up.append(job)
                self._lock.notify_all()

    def report_save(self, report: SaveReport) -> None:
        """Add the report of a save that was made elsewhere (layer by layer)."""
        with self._lock:
            self._save_reports.append(report)
        self.changed.set()

    def take_loads(self) -> list[LoadReport]:
        """Loads that ended since the last call."""
        with self._lock:
            reports, self._load_reports = self._load_reports, []
            return reports

    def take_saves(self) -> list[SaveReport]:
        """Saves that ended since the last call."""
        with self._lock:
            reports, self._save_reports = self._save_reports, []
            return reports

    @property
    def loading(self) -> int:
        """Loads without a report yet."""
        with self._lock:
            return len(self._loading)

    @property
    def saving_bytes(self) -> int:
        """Bytes that wait to be saved or are being saved."""
        with self._lock:
            return self._save_bytes

    def wait_saved(self, timeout_s: float) -> bool:
        """Wait until no save is under way; False when that took too long."""
        with self._lock:
            return self._lock.wait_for(lambda: self._save_bytes == 0, timeout_s)

    def close(self, timeout_s: float = 5.0) -> None:
        """Drop what has not begun and wait for what has. The engine's memory must live until then."""
        with self._lock:
            self._closed = True
            for load in self._loading.values():
                load.cancelled = True
                self._unpark(load)
            dropped = list(self._saves)
            self._saves.clear()
            self._lock.notify_all()
        for save in dropped:
            self._end_save(save, [], 0, 0, {MoveFailure.CANCELLED: len(save.job.keys)})
        deadline_s = time.monotonic() + timeout_s
        for thread in self._threads:
            thread.join(max(0.0, deadline_s - time.monotonic()))
        if self._owns_watcher:
            self._watcher.close()

    def _ending(self, pause_s: float) -> bool:
        with self._lock:
            return self._lock.wait_for(lambda: self._closed, pause_s)

    # --- loads -----------------------------------------------------------------------------------------------

    def _run_loads(self) -> None:
        while True:
            with self._lock:
                while not self._loads and not self._closed:
                    self._lock.wait()
                if not self._loads:
                    return
                load = self._loads.popleft()
            reason: MoveFailure | None = MoveFailure.UNAVAILABLE
            try:
                reason = self._load_ready(load) if load.stream is None else self._go_on(load, load.stream)
            finally:
                if reason is not None:
                    self._end_load(load, reason)

    def _end_load(self, load: _Load, reason: MoveFailure) -> None:
        job, stream, now_s = load.job, load.stream, time.monotonic()
        loaded_bytes = self._memory.bytes_of(job.blocks[: load.loaded])
        report = LoadReport(
            job.name,
            job.blocks,
            load.loaded,
            loaded_bytes,
            now_s - load.started_s,
            reason,
            staged_bytes=staged_of(self._memory, load.staged_bytes, loaded_bytes),
        )
        with self._lock:
            if stream is not None:
                stream.end(now_s)
                report.waited_s = (stream.ended_s or now_s) - load.started_s
                report.hidden_s = stream.hidden_s
                self._streaming -= 1
        load.span.set(
            kvcache__loaded_blocks=report.loaded, kvcache__bytes=report.loaded_bytes, kvcache__reason=reason
        )
        load.span.end()
        with self._lock:
            self._loading.pop(job.name, None)
            self._load_reports.append(report)
        self.changed.set()

    def _go_on(self, load: _Load, stream: Stream) -> MoveFailure | None:
        """Load what has come of a stream. Returns why it ended, None while more is awaited."""
        while True:
            with self._lock:
                if not self._has_work(load, stream):
                    stream.is_parked = True
                    return None
                must_look, ready = stream.must_look, stream.ready
                is_last = stream.ended_s is not None
            if must_look and not load.cancelled:
                self._look(load, stream)
                continue
            begun_s = time.monotonic()
            reason = self._load_ready(load, ready)
            now_s = time.monotonic()
            load.moving_s += now_s - begun_s
            with self._lock:
                stream.moved(begun_s, now_s)
            if reason or (is_last and load.loaded == ready):
                return reason or (MoveFailure.NONE if ready == len(load.job.keys) else MoveFailure.NOT_COME)

    def _look(self, load: _Load, stream: Stream) -> None:
        """Ask the pool for what the wait has not brought."""
        with self._lock:
            stream.must_look = False
            keys = stream.missing_keys
        client, present = self._link.client(load.job.session_token), None
        try:
            if client is not None:
                present = client.exists_many(keys, timeout_s=_LOOK_TIMEOUT_S)
                self._link.succeeded()
        except Exception as error:  # noqa: BLE001  (a defect of the client must not end the thread)
            self._link.failed(Call.LOOKUP, error)
        with self._lock:
            if present is None:
                stream.look_failed(time.monotonic())
            else:
                stream.looked(present, time.monotonic())

    def _load_ready(self, load: _Load, ready: int | None = None) -> MoveFailure:
        """Load the blocks before `ready`, or all. Returns the reason why not every one of them came."""
        job = load.job
        end = len(job.keys) if ready is None else ready
        deadline_s = load.started_s + (0.0 if load.stream is None else job.await_s) + self._load_timeout_s
        # A pace counts the time of moving bytes; a stream also waits for them.
        begun_s = load.started_s if load.stream is None else time.monotonic() - load.moving_s
        most = max(1, BATCH_BYTES // self._memory.block_bytes)
        blocks = most if job.pace is None else max(1, FIRST_BATCH_BYTES // self._memory.block_bytes)
        while load.loaded < end:
            at, due_s = load.loaded, deadline_s
            if job.pace is not None:
                due_s = min(deadline_s, begun_s + job.pace.due_s(at))
            if load.cancelled:
                return MoveFailure.CANCELLED
            if time.monotonic() >= due_s:
                return MoveFailure.TOO_SLOW if _is_cut(due_s, deadline_s) else MoveFailure.TIMEOUT
            client = self._link.client(job.session_token)
            if client is None:
                return MoveFailure.ABSENT
            stop = min(end, at + blocks)
            part = TransferJob(job.name, job.keys[at:stop], job.blocks[at:stop])
            came, reason = self._load_batch(client, part, load, due_s, deadline_s)
            load.loaded += came
            if reason:
                return reason
            if job.pace is not None:
                blocks = min(most, job.pace.batch_blocks(blocks, load.loaded, time.monotonic() - begun_s))
        return MoveFailure.CANCELLED if load.cancelled and end < len(job.keys) else MoveFailure.NONE

    def _load_batch(
        self, client: PoolClient, part: TransferJob, load: _Load, due_s: float, deadline_s: float
    ) -> tuple[int, MoveFailure]:
        """Blocks of the part that came, and why not more. The pool has until `due_s`, a device until `deadline_s`."""
        try:
            with self._memory.writing(part.blocks, load.fence, deadline_s) as places:
                timeout_s = max(due_s - time.monotonic(), _TIMEOUT_MIN_S)
                result = client.get_many_into(list(part.keys), places, timeout_s=timeout_s)
        except InDoubt as doubt:
            doubt.wait(self._ending)
            return 0, reason_of(doubt.error.code)
        except Exception as error:  # noqa: BLE001  (a defect of the client must not end the thread)
            if isinstance(error, DeadlineExceeded) and _is_cut(due_s, deadline_s):
                return 0, MoveFailure.TOO_SLOW  # it had less time than a failure takes
            self._link.failed(Call.LOAD, error)
            return 0, reason_of(code_of(error))
        self._link.succeeded()
        load.staged_bytes += result.staged_bytes
        for index, code in enumerate(result.codes):
            if code == DeadlineExceeded.code and _is_cut(due_s, deadline_s):
                return index, MoveFailure.TOO_SLOW
            if code != OK:
                return index, reason_of(code)
            if result.sizes_bytes[index] != self._memory.bytes_of(part.blocks[index : index + 1]):
                return index, MoveFailure.WRONG_SIZE
        return len(part.keys), MoveFailure.NONE

    # --- saves -----------------------------------------------------------------------------------------------

    def _run_saves(self) -> None:
        while True:
            with self._lock:
                while not (self._saves or self._given_up or self._closed):
                    self._lock.wait()
                lost_job = self._given_up.popleft() if self._given_up else None
                if lost_job is None:
                    if not self._saves:
                        return
                    save = self._saves.popleft()
            if lost_job is not None:
                self._link.give_up(lost_job.keys, lost_job.node, lost_job.session_token)
                continue
            stored: list[int] = []
            lost: dict[MoveFailure, int] = {}
            present = moved = 0
            try:
                with _span("kvcache.save", save.job) as span:
                    present, moved = self._save_batches(save, stored, lost)
                    span.set(
                        kvcache__present_blocks=present,
                        kvcache__bytes=moved,
                        kvcache__lost=sum(lost.values()),
                    )
            finally:
                self._end_save(save, stored, present, moved, lost)

    def _end_save(
        self, save: _Save, stored: list[int], present: int, moved: int, lost: dict[MoveFailure, int]
    ) -> None:
        seconds = time.monotonic() - save.started_s
        report = SaveReport(save.job.name, tuple(stored), present, moved, seconds, lost)
        report.staged_bytes = staged_of(self._memory, save.staged_bytes, moved)
        with self._lock:
            self._save_bytes -= save.size_bytes
            self._save_reports.append(report)
            self._lock.notify_all()
        self.changed.set()

    def _save_batches(self, save: _Save, stored: list[int], lost: dict[MoveFailure, int]) -> tuple[int, int]:
        """Fill `stored` and `lost`. Returns the blocks that were already stored and the bytes moved."""
        job = save.job
        deadline_s = time.monotonic() + self._save_timeout_s
        step = job.blocks_at_once(self._memory.block_bytes, BATCH_BYTES)
        present = moved = 0
        for at in range(0, len(job.keys), step):
            indices = list(range(at, min(at + step, len(job.keys))))
            left_s = deadline_s - time.monotonic()
            client = self._link.client(job.session_token)
            if client is None or left_s <= 0:
                reason = MoveFailure.ABSENT if client is None else MoveFailure.TIMEOUT
                lost[reason] = lost.get(reason, 0) + len(job.keys) - at
                self._give_up(job, range(at, len(job.keys)))
                break
            codes = self._save_batch(client, save, indices, left_s)
            unsaid = []
            for index, (code, node) in codes.items():
                if code == _IS_THERE:
                    stored.append(index)
                    present += 1
                elif code in {OK, AlreadyExists.code}:
                    stored.append(index)
                    moved += self._memory.bytes_of(job.blocks[index : index + 1])
                else:
                    lost[reason_of(code)] = lost.get(reason_of(code), 0) + 1
                if code not in {OK, AlreadyExists.code, _IS_THERE} or (job.node and node != job.node):
                    unsaid.append(index)
            self._give_up(job, unsaid)
        return present, moved

    def _give_up(self, job: TransferJob, positions: Sequence[int]) -> None:
        """Blocks that the job's node will not have, because they are lost or lie at another one: whoever waits there
        looks again."""
        if job.is_awaited:
            self._link.give_up([job.keys[at] for at in positions], job.node, job.session_token)

    def _save_batch(
        self, client: PoolClient, save: _Save, indices: list[int], timeout_s: float
    ) -> dict[int, tuple[int, str]]:
        """For each index its code and the node that has it, if that is known; `_IS_THERE` needed no save."""
        job = save.job
        ends = dict.fromkeys(indices, (_IS_THERE, ""))
        wanted = indices
        begun_s = time.monotonic()
        try:
            there = client.exists_many([job.keys[i] for i in indices], timeout_s=timeout_s)
            wanted = [index for index, known in zip(indices, there, strict=True) if not known]
            if wanted:
                deadline_s = begun_s + timeout_s
                with self._memory.reading([job.blocks[i] for i in wanted], save.fence, deadline_s) as values:
                    left_s = max(deadline_s - time.monotonic(), _TIMEOUT_MIN_S)
                    keys = [job.keys[i] for i in wanted]
                    result = client.put_many(keys, values, prefer_node=job.node or None, timeout_s=left_s)
                save.staged_bytes += result.staged_bytes
                nodes = result.node_ids if job.node else ("",) * len(wanted)
                codes = (OK if code == FewerReplicas.code else code for code in result.codes)
                ends.update(zip(wanted, zip(codes, nodes, strict=True), strict=True))
        except Exception as error:  # noqa: BLE001  (as above)
            self._link.failed(Call.SAVE, error)
            return ends | dict.fromkeys(wanted, (code_of(error), ""))
        self._link.succeeded()
        return ends
