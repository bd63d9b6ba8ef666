"""Blocks that an engine computed although the pool had them, compared with the pool's on a thread of its own.

Idea: a job is handed over like a save, and its report is that of a save: the engine keeps the blocks as they are until
then. Blocks that are as the pool has them count as stored. Those that are too far (kvcache/distance.py) are reported
to the master, who removes them and may quarantine their writer; to the engine they are lost like any block that was
not saved. Whatever goes wrong leaves the blocks unchecked, which is counted.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

from mooncache.auth import parse_session_token
from mooncache.errors import OK, NotFound
from mooncache.kvcache.distance import Comparison
from mooncache.kvcache.memory import BlockMemory, Fence
from mooncache.kvcache.pool_link import Call, PoolClient, PoolLink, code_name
from mooncache.kvcache.transfers import MoveFailure, SaveReport, TransferJob
from mooncache.runtime.logs import Event, get_logger

QUEUE_BYTES_MAX: Final = 256 << 20
"""Blocks that wait to be compared; further ones stay unchecked."""
BATCH_BYTES: Final = 8 << 20
REPORT_TIMEOUT_S: Final = 5.0
_SHOWN_MAX: Final = 4
"""Keys in a line of the log."""

_log = get_logger(__name__)


@dataclass(slots=True)
class ShadowReport:
    """How one job ended: numbers of blocks, and the distances that were measured."""

    same: int = 0
    different: int = 0
    unchecked: int = 0
    distances: list[float] = field(default_factory=list)

    def counts(self) -> dict[str, int]:
        """Numbers of blocks by their label in metrics."""
        return {"same": self.same, "different": self.different, "unchecked": self.unchecked}


@dataclass(slots=True)
class _Check:
    job: TransferJob
    fence: Fence | None
    size_bytes: int
    started_s: float


class Verifier:
    """Compares blocks on its own thread.

    Args:
        memory: the engine's blocks.
        saved: takes the report of each job, as `Mover.report_save` does; called on the verifier's thread.
        heard: takes what was found; called there, too.
        timeout_s: for the blocks of one job.
    """

    def __init__(
        self,
        link: PoolLink,
        memory: BlockMemory,
        comparison: Comparison,
        *,
        saved: Callable[[SaveReport], None],
        heard: Callable[[ShadowReport], None],
        timeout_s: float,
    ) -> None:
        self._link, self._memory, self._comparison = link, memory, comparison
        self._saved, self._heard = saved, heard
        self._timeout_s = timeout_s
        self._lock = threading.Condition()
        self._checks: deque[_Check] = deque()
        self._bytes = 0
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="mooncache-verify", daemon=True)
        self._thread.start()

    def check(self, job: TransferJob) -> None:
        """Begin to compare the job's blocks; they must not change until its report."""
        size_bytes = self._memory.bytes_of(job.blocks)
        check = _Check(job, self._memory.fence(), size_bytes, time.monotonic())
        with self._lock:
            fits = self._bytes + size_bytes <= QUEUE_BYTES_MAX and not self._closed
            if fits:
                self._bytes += size_bytes
                self._checks.append(check)
                self._lock.notify_all()
        if not fits:
            self._end(check, ShadowReport(unchecked=len(job.keys)), {})

    def wait_checked(self, timeout_s: float) -> bool:
        """Wait until nothing is compared; False when that took too long."""
        with self._lock:
            return self._lock.wait_for(lambda: self._bytes == 0, timeout_s)

    def close(self, timeout_s: float = 5.0) -> None:
        """Leave what waits unchecked and end the thread. The engine's memory must live until then."""
        with self._lock:
            self._closed = True
            self._lock.notify_all()
        self._thread.join(timeout_s)

    def _run(self) -> None:
        while True:
            with self._lock:
                while not (self._checks or self._closed):
                    self._lock.wait()
                if not self._checks:
                    return
                check, closed = self._checks.popleft(), self._closed
            found, lost = ShadowReport(), dict[int, MoveFailure]()
            try:
                if not closed:
                    self._compare(check, found, lost)
            except Exception as error:  # noqa: BLE001  (a defect of the client must not end the thread)
                self._link.failed(Call.VERIFY, error)
            finally:
                found.unchecked = len(check.job.keys) - found.same - found.different
                with self._lock:
                    self._bytes -= check.size_bytes
                    self._lock.notify_all()
                self._end(check, found, lost)

    def _end(self, check: _Check, found: ShadowReport, lost: dict[int, MoveFailure]) -> None:
        job = check.job
        stored = tuple(at for at in range(len(job.keys)) if at not in lost)
        reasons: dict[MoveFailure, int] = {}
        for reason in lost.values():
            reasons[reason] = reasons.get(reason, 0) + 1
        self._heard(found)
        seconds = time.monotonic() - check.started_s
        self._saved(SaveReport(job.name, stored, len(stored), 0, seconds, reasons))

    def _compare(self, check: _Check, found: ShadowReport, lost: dict[int, MoveFailure]) -> None:
        """Fill in what was found, and positions that the pool has not, or no more."""
        job, deadline_s = check.job, time.monotonic() + self._timeout_s
        step = max(1, BATCH_BYTES // self._memory.block_bytes)
        for first in range(0, len(job.keys), step):
            part = replace(job, keys=job.keys[first : first + step], blocks=job.blocks[first : first + step])
            client = self._link.client(job.session_token)
            left_s = deadline_s - time.monotonic()
            if client is None or left_s <= 0:
                return
            wrong: list[int] = []
            for at, distance in self._distances(client, part, check.fence, deadline_s, left_s).items():
                if distance is None:
                    lost[first + at] = MoveFailure.MISSING
                    continue
                found.distances.append(distance)
                if distance <= self._comparison.tolerance:
                    found.same += 1
                else:
                    found.different += 1
                    lost[first + at] = MoveFailure.DIFFERENT
                    wrong.append(at)
            self._link.succeeded()
            if wrong:
                worst = max(found.distances)
                self._report(job, [part.keys[at] for at in wrong], worst)

    def _distances(
        self, client: PoolClient, part: TransferJob, fence: Fence | None, deadline_s: float, left_s: float
    ) -> dict[int, float | None]:
        """By position; None: the pool does not have it. What did not come for another reason is left out."""
        places = [bytearray(self._memory.bytes_of([block])) for block in part.blocks]
        views = [[memoryview(place)] for place in places]
        result = client.get_many_into(list(part.keys), views, timeout_s=left_s)
        distances: dict[int, float | None] = {}
        with self._memory.reading(part.blocks, fence, deadline_s) as computed:
            for at, code in enumerate(result.codes):
                if code == NotFound.code:
                    distances[at] = None
                elif code == OK:
                    stored = memoryview(places[at])[: result.sizes_bytes[at]]
                    distances[at] = self._comparison.distance(computed[at], stored)
        return distances

    def _report(self, job: TransferJob, keys: Sequence[bytes], worst: float) -> None:
        """Tell the master. The engine's own client asks, because a tenant may not accuse."""
        tenant = parse_session_token(job.session_token).tenant if job.session_token else ""
        writers: list[str] = []
        quarantined, code = False, ""
        try:
            client = self._link.client()
            if client is not None:
                answer = client.report_wrong(
                    keys, self._comparison.difference(worst), tenant=tenant, timeout_s=REPORT_TIMEOUT_S
                )
                writers = [f"{each.writer_id:016x} {each.instance}" for each in answer.writers]
                quarantined = any(each.quarantined for each in answer.writers)
        except Exception as error:  # noqa: BLE001  (the finding is worth a line in any case)
            code = code_name(error)
        _log.error(
            Event.CONNECTOR_BLOCKS_DIFFER,
            keys=[key.hex() for key in keys[:_SHOWN_MAX]],
            blocks=len(keys),
            distance=worst,
            tolerance=self._comparison.tolerance,
            writers=writers,
            quarantined=quarantined,
            code=code,
        )
