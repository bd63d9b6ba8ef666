"""The decode side: reads parcels, verifies them, and puts them into the rows of requests that still run.

Invariant: bytes move into a request's rows under its lock, and only before `close`. So when `close` has returned, its
rows belong to the next request, whatever the other side does or has sent.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

import torch

from mooncache import _native
from mooncache.connectors.sglang.core.parcels import ParcelNote, ParcelTaken
from mooncache.connectors.sglang.handover.buffers import EngineBuffers, RequestRows
from mooncache.connectors.sglang.handover.outbox import PREFILL_NAME, SLOT_BYTES
from mooncache.errors import ChecksumMismatch, InvalidArgument, MooncacheError, PermissionDenied
from mooncache.runtime.logs import Event, get_logger
from mooncache.transfer import EnginePeer, TransferEngine

READERS: Final = 4
NOTES_MAX: Final = 1 << 14
PEERS_MAX: Final = 1024
ATTEMPTS: Final = 2
ENDED: Final = "The decode side has ended the request."
_log = get_logger(__name__)


@dataclass(slots=True)
class _OpenRoom:
    rows: RequestRows
    opening: int
    lock: threading.Lock = field(default_factory=threading.Lock)
    closed: bool = False


class Inbox:
    """Takes parcels for the requests that are open.

    Args:
        answer: (note, answer) sends the answer to the rank that has announced it; it must not raise.
        failed: (room, why), before the answer is sent.
    """

    def __init__(
        self,
        engine: TransferEngine,
        buffers: EngineBuffers,
        *,
        answer: Callable[[ParcelNote, ParcelTaken], None],
        failed: Callable[[int, str], None],
        timeout_s: float,
    ) -> None:
        self._engine, self._buffers, self._timeout_s = engine, buffers, timeout_s
        self._answer, self._failed = answer, failed
        self._lock = threading.Lock()
        self._open: dict[int, _OpenRoom] = {}
        self._openings = 0
        self._queues: list[queue.Queue[tuple[ParcelNote, bytes] | None]] = [
            queue.Queue(NOTES_MAX) for _ in range(READERS)
        ]
        self._threads = [
            threading.Thread(target=self._read_all, args=(each,), name=f"mooncache-reader-{at}", daemon=True)
            for at, each in enumerate(self._queues)
        ]
        for thread in self._threads:
            thread.start()

    def expect(self, room: int, rows: RequestRows) -> int:
        """Open a request: these are its rows. The number of this opening; that of an open one stays."""
        with self._lock:
            if room not in self._open:
                self._openings += 1
                self._open[room] = _OpenRoom(rows, self._openings)
            return self._open[room].opening

    def close(self, room: int) -> None:
        """No byte moves into the request's rows once this has returned; twice is harmless."""
        with self._lock:
            entry = self._open.pop(room, None)
        if entry is not None:
            with entry.lock:
                entry.closed = True

    def offer(self, note: ParcelNote, descriptor: bytes) -> None:
        """A parcel that was announced. Never blocks."""
        try:
            self._queues[note.number % READERS].put_nowait((note, descriptor))
        except queue.Full:
            self._refuse(note, "The decode side has too many parcels to read.")

    def stop(self) -> None:
        """End the readers; parcels that wait are not read."""
        for each in self._queues:
            each.put(None)
        for thread in self._threads:
            thread.join(self._timeout_s)

    def _read_all(self, notes: queue.Queue[tuple[ParcelNote, bytes] | None]) -> None:
        staging = torch.empty(SLOT_BYTES, dtype=torch.uint8)
        peers: dict[bytes, EnginePeer] = {}
        while (item := notes.get()) is not None:
            note, descriptor = item
            try:
                self._take(note, descriptor, staging, peers)
            except Exception as error:  # noqa: BLE001  (one request must not end the others')
                known = isinstance(error, MooncacheError)
                event = Event.CONNECTOR_LOAD_FAILED if known else Event.CONNECTOR_DEFECT
                _log.warning(
                    event, code=getattr(error, "name", "DEFECT"), reason=str(error), exc_info=not known
                )
                self._refuse(note, f"{type(error).__name__}: {error}")
        for peer in peers.values():
            peer.close()

    def _refuse(self, note: ParcelNote, why: str) -> None:
        with self._lock:
            entry = self._open.get(note.room)
        if entry is not None and entry.opening == note.opening:
            self._failed(note.room, why)
        self._answer(note, ParcelTaken(note.room, note.number, why))

    def _take(
        self, note: ParcelNote, descriptor: bytes, staging: torch.Tensor, peers: dict[bytes, EnginePeer]
    ) -> None:
        with self._lock:
            entry = self._open.get(note.room)
        if entry is None or entry.opening != note.opening:
            self._answer(note, ParcelTaken(note.room, note.number, ENDED))
            return
        if sum(piece.size_bytes for piece in note.pieces) != note.size_bytes or note.size_bytes > SLOT_BYTES:
            raise InvalidArgument(f"The rows of a parcel are not {note.size_bytes} bytes.")
        self._read(note, descriptor, staging, peers)
        with entry.lock:
            if not entry.closed:
                self._buffers.scatter(note.pieces, entry.rows, staging)
        self._answer(note, ParcelTaken(note.room, note.number, ENDED if entry.closed else ""))

    def _read(
        self, note: ParcelNote, descriptor: bytes, staging: torch.Tensor, peers: dict[bytes, EnginePeer]
    ) -> None:
        """Bytes that are what the other side has copied out of its rows. Raises what the transfer engine raises."""
        view = memoryview(staging.numpy())[: note.size_bytes]
        for attempt in range(ATTEMPTS):
            last = attempt + 1 == ATTEMPTS
            try:
                peer = self._peer(descriptor, peers)
                peer.read([(view, note.address, note.size_bytes)], timeout_s=self._timeout_s).wait()
                if _native.crc32c(view) == note.crc32c:
                    return
                if last:
                    raise ChecksumMismatch(
                        "A parcel has other bytes than the prefill side has copied out of its KV."
                    )
            except MooncacheError:
                closing = peers.pop(descriptor, None)
                if closing is not None:
                    closing.close()
                if last:
                    raise

    def _peer(self, descriptor: bytes, peers: dict[bytes, EnginePeer]) -> EnginePeer:
        peer = peers.get(descriptor)
        if peer is None:
            peer = self._engine.connect(descriptor, timeout_s=self._timeout_s)
            if peer.name != PREFILL_NAME:
                peer.close()
                raise PermissionDenied(
                    f"{peer.name!r} is no prefill engine; its name would be {PREFILL_NAME!r}."
                )
            if len(peers) >= PEERS_MAX:
                peers.pop(next(iter(peers))).close()
            peers[descriptor] = peer
        return peer
