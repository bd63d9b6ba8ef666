"""The prefill side: rows of requests in staging memory, until the decode side has taken them.

Invariant: a slot of the staging memory has one owner: a worker that fills it, or a parcel that was announced and not
answered yet. What ends a request frees its slots at once. Whoever still reads such a slot gets other bytes than the
checksum says, and the request that they are for has ended.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

import torch

from mooncache import _native
from mooncache.connectors.sglang.core.parcels import METADATA, ParcelNote, ParcelTaken, Piece, parcels
from mooncache.connectors.sglang.handover.buffers import EngineBuffers, RequestRows
from mooncache.errors import DeadlineExceeded, MooncacheError
from mooncache.runtime.logs import Event, get_logger
from mooncache.transfer import TransferEngine

PREFILL_NAME: Final = "sglang-prefill"
DECODE_NAME: Final = "sglang-decode"
"""What the engines of the two sides prove: both serve for ranks of every model and cluster member."""
SLOT_BYTES: Final = 32 << 20
SLOTS: Final = 8
WORKERS: Final = 4
CHUNKS_MAX: Final = 1 << 16
_LIVE_CHECK_S: Final = 0.1
_log = get_logger(__name__)


class Destination(NamedTuple):
    """One decode rank's control socket."""

    host: str
    port: int


class ChunkTarget(NamedTuple):
    """What of a chunk goes to one decode rank."""

    destination: Destination
    opening: int
    pieces: list[Piece]


@dataclass(frozen=True, slots=True)
class Chunk:
    """A part of a request that SGLang gives for sending."""

    room: int
    last: bool
    rows: Callable[[], RequestRows]
    """Waits until the rows can be read."""
    targets: Callable[[RequestRows], list[ChunkTarget]]


@dataclass(slots=True)
class _Room:
    outstanding: set[int] = field(default_factory=set)
    complete: bool = False


class _Announced(NamedTuple):
    room: int
    slot: int
    at_s: float


class Outbox:
    """Sends chunks, and knows which of their parcels were taken.

    Args:
        announce: sends a note to a decode rank; it raises when it cannot.
        live: whether a request has neither ended nor failed.
        delivered: all parcels of a request are in place on the other side.
        failed: (room, why).
    """

    def __init__(
        self,
        engine: TransferEngine,
        buffers: EngineBuffers,
        *,
        reply_to: str,
        announce: Callable[[Destination, ParcelNote], None],
        live: Callable[[int], bool],
        delivered: Callable[[int], None],
        failed: Callable[[int, str], None],
        timeout_s: float,
    ) -> None:
        self._buffers, self._reply_to, self._timeout_s = buffers, reply_to, timeout_s
        self._announce, self._live, self._delivered, self._failed = announce, live, delivered, failed
        self._region = engine.allocate(SLOT_BYTES * SLOTS, label="parcels", readable_by=DECODE_NAME)
        memory = torch.frombuffer(self._region.buffer, dtype=torch.uint8)
        self._memory = [memory[at * SLOT_BYTES : (at + 1) * SLOT_BYTES] for at in range(SLOTS)]
        self._slots: queue.SimpleQueue[int] = queue.SimpleQueue()
        for slot in range(SLOTS):
            self._slots.put(slot)
        self._lock = threading.Lock()
        self._rooms: dict[int, _Room] = {}
        self._announced: dict[int, _Announced] = {}
        self._count = 0
        self._queues: list[queue.Queue[tuple[Chunk, _Room] | None]] = [
            queue.Queue(CHUNKS_MAX) for _ in range(WORKERS)
        ]
        self._threads = [
            threading.Thread(target=self._work, args=(each,), name=f"mooncache-parcels-{at}", daemon=True)
            for at, each in enumerate(self._queues)
        ]
        for thread in self._threads:
            thread.start()

    def put(self, chunk: Chunk) -> None:
        """Send a chunk after those of its request that were put before. Never blocks; raises queue.Full."""
        with self._lock:
            room = self._rooms.setdefault(chunk.room, _Room())
        self._queues[chunk.room % WORKERS].put_nowait((chunk, room))

    def taken(self, answer: ParcelTaken) -> None:
        """An answer of the decode side. One to a parcel of a request that has ended is ignored."""
        with self._lock:
            announced = self._announced.get(answer.number)
            if announced is None or announced.room != answer.room:
                return
            del self._announced[answer.number]
            room = self._rooms[announced.room]
            room.outstanding.discard(answer.number)
            whole = room.complete and not room.outstanding
        self._slots.put(announced.slot)
        if answer.problem:
            self._failed(answer.room, answer.problem)
            self.forget(answer.room)
        elif whole:
            self._delivered(answer.room)

    def forget(self, room: int) -> None:
        """The request has ended: its slots are free, and chunks of it that wait are dropped."""
        with self._lock:
            ended = self._rooms.pop(room, None)
            slots = [self._announced.pop(number).slot for number in ended.outstanding] if ended else []
        for slot in slots:
            self._slots.put(slot)

    def sweep(self) -> None:
        """Give up requests whose parcels were not taken in time. To be called now and then."""
        with self._lock:
            oldest_s = time.monotonic() - self._timeout_s
            late = {each.room for each in self._announced.values() if each.at_s < oldest_s}
        for room in late:
            self._failed(room, f"The decode side has taken nothing for {self._timeout_s:g} s.")
            self.forget(room)

    def close(self) -> None:
        """End the workers. The staging memory goes with its engine."""
        for each in self._queues:
            each.put(None)
        for thread in self._threads:
            thread.join(self._timeout_s)

    def _work(self, chunks: queue.Queue[tuple[Chunk, _Room] | None]) -> None:
        while (item := chunks.get()) is not None:
            chunk, room = item
            try:
                self._send(chunk, room)
            except Exception as error:  # noqa: BLE001  (one request must not end the others')
                known = isinstance(error, MooncacheError)
                event = Event.CONNECTOR_LOAD_FAILED if known else Event.CONNECTOR_DEFECT
                _log.warning(
                    event, code=getattr(error, "name", "DEFECT"), reason=str(error), exc_info=not known
                )
                self._failed(chunk.room, f"{type(error).__name__}: {error}")
                self.forget(chunk.room)

    def _runs(self, number: int, room: _Room) -> bool:
        """Whether the request still runs, and is no later one of the same number."""
        return self._rooms.get(number) is room and self._live(number)

    def _send(self, chunk: Chunk, room: _Room) -> None:
        if not self._runs(chunk.room, room):
            return
        rows = chunk.rows()
        for target in chunk.targets(rows):
            for parcel in parcels(target.pieces, SLOT_BYTES):
                if not self._send_parcel(chunk.room, room, target, parcel, rows):
                    return
        with self._lock:
            room.complete = chunk.last
            whole = chunk.last and not room.outstanding
        if whole and self._runs(chunk.room, room):
            self._delivered(chunk.room)

    def _send_parcel(
        self, number: int, room: _Room, target: ChunkTarget, parcel: Sequence[Piece], rows: RequestRows
    ) -> bool:
        """False: the request has ended."""
        slot = self._slot_for(number, room)
        if slot is None:
            return False
        memory = self._memory[slot]
        try:
            size = self._buffers.gather(parcel, rows, memory)
            # An engine reuses rows of a request only after its end. So if it has not ended now, they were its own.
            claim = self._claim(number, room, slot)
        except BaseException:
            self._slots.put(slot)
            raise
        if claim is None:
            self._slots.put(slot)
            return False
        note = ParcelNote(
            room=number,
            opening=target.opening,
            number=claim,
            address=self._region.address + slot * SLOT_BYTES,
            size_bytes=size,
            crc32c=_native.crc32c(memory.numpy()[:size]),
            pieces=tuple(parcel),
            reply_to=self._reply_to,
        )
        self._announce(target.destination, note)
        return True

    def _claim(self, number: int, room: _Room, slot: int) -> int | None:
        """The number of a new parcel; None: the request has ended."""
        with self._lock:
            if not self._runs(number, room):
                return None
            self._count += 1
            room.outstanding.add(self._count)
            self._announced[self._count] = _Announced(number, slot, time.monotonic())
            return self._count

    def _slot_for(self, number: int, room: _Room) -> int | None:
        """A free slot; None: the request has ended. Raises DeadlineExceeded."""
        end_s = time.monotonic() + self._timeout_s
        while self._runs(number, room):
            try:
                return self._slots.get(timeout=_LIVE_CHECK_S)
            except queue.Empty:
                if time.monotonic() > end_s:
                    raise DeadlineExceeded(
                        f"No staging memory was free for {self._timeout_s:g} s: decode ranks are too slow."
                    ) from None
        return None


def metadata_rows(index: int | None) -> dict[int, Any]:
    """The row with the first token, for the last chunk."""
    return {} if index is None else {METADATA: [index]}
