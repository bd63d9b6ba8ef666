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
- A report always comes, also when the pool is absent, slow or dead: no call is without a time limit.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from dataclasses import dataclass, field
from enum import StrEnum

from mooncache.errors import (
    OK,
    AlreadyExists,
    BackPressure,
    ChecksumMismatch,
    DeadlineExceeded,
    Internal,
    MooncacheError,
    NoSpace,
    NotFound,
    QuotaExceeded,
)
from mooncache.kvcache.core.break_even import FIRST_BATCH_BYTES, Pace
from mooncache.kvcache.memory import BlockMemory, Fence, InDoubt
from mooncache.kvcache.pool_link import Call, PoolClient, PoolLink
from mooncache.runtime import tracing

BATCH_BYTES = 32 << 20
_TIMEOUT_MIN_S = 1e-3


class MoveFailure(StrEnum):
    """Why a block was not loaded or saved. They are labels of metrics."""

    NONE = ""  # it was
    MISSING = "missing"
    CHECKSUM = "checksum"
    TIMEOUT = "timeout"
    UNAVAILABLE = "unavailable"
    WRONG_SIZE = "wrong_size"
    ABSENT = "pool_absent"
    CANCELLED = "cancelled"
    FULL = "full"
    TOO_SLOW = "too_slow"  # it would have come later than it can be computed
    STALE = "stale"  # its key was made for other weights than the engine has now


_REASON_OF_CODE = {
    NotFound.code: MoveFailure.MISSING,
    ChecksumMismatch.code: MoveFailure.CHECKSUM,
    DeadlineExceeded.code: MoveFailure.TIMEOUT,
    NoSpace.code: MoveFailure.FULL,
    BackPressure.code: MoveFailure.FULL,
    QuotaExceeded.code: MoveFailure.FULL,
}
LOAD_THREADS = 2  # one loads while the other copies
SAVE_THREADS = 1


def _span(name: str, job: TransferJob) -> tracing.Span:
    return tracing.span(name, kind="client", parent=job.trace, root=False, kvcache__blocks=len(job.keys))


def reason_of(code: int) -> MoveFailure:
    """The failure that a stable error code stands for."""
    return _REASON_OF_CODE.get(code, MoveFailure.UNAVAILABLE)


def _is_cut(due_s: float, deadline_s: float) -> bool:
    """True when a call's time ended for the sake of the pace, before the time limit of the load."""
    return due_s < deadline_s


def _code_of(error: Exception) -> int:
    return error.code if isinstance(error, MooncacheError) else Internal.code


@dataclass(frozen=True, slots=True)
class TransferJob:
    """`keys[i]` names the bytes of the engine's block `blocks[i]`; `trace` is the request's, when it has one; `pace` is
    what a load has to keep, if anything."""

    name: str
    keys: tuple[bytes, ...]
    blocks: tuple[int, ...]
    trace: tracing.TraceContext | None = None
    pace: Pace | None = None


@dataclass(slots=True)
class LoadReport:
    """How a load ended: the first `loaded` blocks have their bytes, all others are undefined.

    Seconds are from hand-over to end; `reason` says why not every block came.
    """

    name: str
    blocks: tuple[int, ...]
    loaded: int
    loaded_bytes: int
    seconds: float
    reason: MoveFailure = MoveFailure.NONE


@dataclass(slots=True)
class SaveReport:
    """How a save ended: indices of the keys that the pool holds now, bytes that moved, why others were given up."""

    name: str
    stored: tuple[int, ...]
    present: int
    saved_bytes: int
    seconds: float
    lost: dict[MoveFailure, int] = field(default_factory=dict)


@dataclass(slots=True)
class _Load:
    job: TransferJob
    fence: Fence | None
    started_s: float
    cancelled: bool = False


@dataclass(slots=True)
class _Save:
    job: TransferJob
    fence: Fence | None
    started_s: float
    size_bytes: int


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
    ) -> None:
        self._link = link
        self._memory = memory
        self._load_timeout_s = load_timeout_s
        self._save_timeout_s = save_timeout_s
        self._save_queue_bytes_max = save_queue_bytes_max
        self.changed = changed or threading.Event()
        self._lock = threading.Condition()
        self._loads: deque[_Load] = deque()
        self._saves: deque[_Save] = deque()
        self._loading: dict[str, _Load] = {}
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
        load = _Load(job, self._memory.fence(), time.monotonic())
        with self._lock:
            self._loading[job.name] = load
            self._loads.append(load)
            self._lock.notify_all()

    def cancel(self, name: str) -> None:
        """End a load early: what has not begun does not begin. The report comes as always."""
        with self._lock:
            load = self._loading.get(name)
            if load is not None:
                load.cancelled = True

    def save(self, job: TransferJob) -> None:
        """Begin to save the job's blocks; they must not change until the report."""
        size_bytes = len(job.blocks) * self._memory.block_bytes
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
            self.changed.set()

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
            dropped = list(self._saves)
            self._saves.clear()
            self._lock.notify_all()
        for save in dropped:
            self._end_save(save, [], 0, 0, {MoveFailure.CANCELLED: len(save.job.keys)})
        deadline_s = time.monotonic() + timeout_s
        for thread in self._threads:
            thread.join(max(0.0, deadline_s - time.monotonic()))

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
            loaded = 0
            reason = MoveFailure.UNAVAILABLE
            try:
                with _span("kvcache.load", load.job) as span:
                    loaded, reason = self._load_batches(load)
                    span.set(
                        kvcache__loaded_blocks=loaded,
                        kvcache__bytes=loaded * self._memory.block_bytes,
                        kvcache__reason=reason,
                    )
            finally:
                job = load.job
                report = LoadReport(
                    job.name,
                    job.blocks,
                    loaded,
                    loaded * self._memory.block_bytes,
                    time.monotonic() - load.started_s,
                    reason,
                )
                with self._lock:
                    self._loading.pop(job.name, None)
                    self._load_reports.append(report)
                self.changed.set()

    def _load_batches(self, load: _Load) -> tuple[int, MoveFailure]:
        """Leading blocks that were loaded, and the reason why not more."""
        job = load.job
        deadline_s = load.started_s + self._load_timeout_s
        batch_bytes = BATCH_BYTES if job.pace is None else FIRST_BATCH_BYTES
        at = 0
        while at < len(job.keys):
            due_s = deadline_s
            if job.pace is not None:
                due_s = min(deadline_s, load.started_s + job.pace.due_s(at))
            if load.cancelled:
                return at, MoveFailure.CANCELLED
            if time.monotonic() >= due_s:
                return at, MoveFailure.TOO_SLOW if _is_cut(due_s, deadline_s) else MoveFailure.TIMEOUT
            client = self._link.client()
            if client is None:
                return at, MoveFailure.ABSENT
            end = min(len(job.keys), at + max(1, batch_bytes // self._memory.block_bytes))
            part = TransferJob(job.name, job.keys[at:end], job.blocks[at:end])
            came, reason = self._load_batch(client, part, load.fence, due_s, deadline_s)
            if reason:
                return at + came, reason
            at, batch_bytes = end, min(BATCH_BYTES, 2 * batch_bytes)
        return len(job.keys), MoveFailure.NONE

    def _load_batch(
        self, client: PoolClient, part: TransferJob, fence: Fence | None, due_s: float, deadline_s: float
    ) -> tuple[int, MoveFailure]:
        """Blocks of the part that came, and why not more. The pool has until `due_s`, a device until `deadline_s`."""
        keys, blocks = part.keys, part.blocks
        try:
            with self._memory.writing(blocks, fence, deadline_s) as places:
                timeout_s = max(due_s - time.monotonic(), _TIMEOUT_MIN_S)
                result = client.get_many_into(list(keys), places, timeout_s=timeout_s)
        except InDoubt as doubt:
            doubt.wait(self._ending)
            return 0, reason_of(doubt.error.code)
        except Exception as error:  # noqa: BLE001  (a defect of the client must not end the thread)
            if isinstance(error, DeadlineExceeded) and _is_cut(due_s, deadline_s):
                return 0, MoveFailure.TOO_SLOW  # it had less time than a failure takes
            self._link.failed(Call.LOAD, error)
            return 0, reason_of(_code_of(error))
        self._link.succeeded()
        for index, code in enumerate(result.codes):
            if code == DeadlineExceeded.code and _is_cut(due_s, deadline_s):
                return index, MoveFailure.TOO_SLOW
            if code != OK:
                return index, reason_of(code)
            if result.sizes_bytes[index] != self._memory.block_bytes:
                return index, MoveFailure.WRONG_SIZE
        return len(keys), MoveFailure.NONE

    # --- saves -----------------------------------------------------------------------------------------------

    def _run_saves(self) -> None:
        while True:
            with self._lock:
                while not self._saves and not self._closed:
                    self._lock.wait()
                if not self._saves:
                    return
                save = self._saves.popleft()
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
        with self._lock:
            self._save_bytes -= save.size_bytes
            self._save_reports.append(report)
            self._lock.notify_all()
        self.changed.set()

    def _save_batches(self, save: _Save, stored: list[int], lost: dict[MoveFailure, int]) -> tuple[int, int]:
        """Fill `stored` and `lost`. Returns the blocks that were already stored and the bytes moved."""
        job = save.job
        deadline_s = time.monotonic() + self._save_timeout_s
        step = max(1, BATCH_BYTES // self._memory.block_bytes)
        present = moved = 0
        for at in range(0, len(job.keys), step):
            indices = list(range(at, min(at + step, len(job.keys))))
            left_s = deadline_s - time.monotonic()
            client = self._link.client()
            if client is None or left_s <= 0:
                reason = MoveFailure.ABSENT if client is None else MoveFailure.TIMEOUT
                lost[reason] = lost.get(reason, 0) + len(job.keys) - at
                break
            wanted, codes = self._save_batch(client, save, indices, left_s)
            asked = set(wanted)
            there = [index for index in indices if index not in asked]
            stored += there
            present += len(there)
            for index, code in zip(wanted, codes, strict=True):
                if code in {OK, AlreadyExists.code}:
                    stored.append(index)
                    moved += self._memory.block_bytes
                else:
                    lost[reason_of(code)] = lost.get(reason_of(code), 0) + 1
        return present, moved

    def _save_batch(
        self, client: PoolClient, save: _Save, indices: list[int], timeout_s: float
    ) -> tuple[list[int], list[int]]:
        """Indices that the pool did not have, and what became of each."""
        job = save.job
        wanted = indices
        begun_s = time.monotonic()
        try:
            there = client.exists_many([job.keys[i] for i in indices], timeout_s=timeout_s)
            wanted = [index for index, known in zip(indices, there, strict=True) if not known]
            if not wanted:
                self._link.succeeded()
                return [], []
            deadline_s = begun_s + timeout_s
            with self._memory.reading([job.blocks[i] for i in wanted], save.fence, deadline_s) as values:
                left_s = max(deadline_s - time.monotonic(), _TIMEOUT_MIN_S)
                result = client.put_many([job.keys[i] for i in wanted], values, timeout_s=left_s)
        except Exception as error:  # noqa: BLE001  (as above)
            self._link.failed(Call.SAVE, error)
            return wanted, [_code_of(error)] * len(wanted)
        self._link.succeeded()
        return wanted, list(result.codes)
