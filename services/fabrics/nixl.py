"""Transfers over NIXL, and so over every fabric for which it has a plugin: UCX, libfabric (EFA, Slingshot), GDS.

How it keeps the contract: NIXL moves bytes on its own threads, and cannot promise that a transfer that was given up
has stopped. So it never sees the caller's memory. A link has staging slots that are registered once; a transfer is cut
into pieces of at most a slot, and the bytes are copied between slot and caller by `poll`, in the pass that computes
their CRC-32C. A cancelled transfer leaves only slots behind, which stay taken until NIXL is through with them.

What it cannot keep: NIXL has no grants. A process that has a node's metadata may read and write all memory that the
node has registered by then, so `NixlNode` is for peers that trust each other (docs/decisions/0013-nixl.md); `writable`
is checked on this side only.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mooncache import _native
from mooncache.errors import (
    Cancelled,
    Closed,
    ConnectionLost,
    InvalidArgument,
    PermissionDenied,
    TransportUnavailable,
)
from mooncache.fabrics.contract import Completion, Extent, Transfer

SLOT_BYTES = 1 << 20
MAX_IN_FLIGHT = 1024
MAX_SLICES = 65_536
_PAUSE_S = 20e-6
_UNDER_WAY = "PROC"
_RDMA_DEVICES = Path("/sys/class/infiniband")
_left_behind: list[mmap.mmap] = []  # slots that NIXL never let go of


def _leave_out_idle_modules() -> None:
    # Before UCX is loaded. Its InfiniBand module brings an rdma-core of its own; where the system's is installed, too,
    # the two end the process with SIGSEGV when it exits (seen with NIXL 1.5.1 on Debian 12). Without a device nothing
    # is lost; what the environment says already is left as it is.
    if not any(_RDMA_DEVICES.glob("*")):
        os.environ.setdefault("UCX_MODULES", "^ib")


def unavailable_reason() -> str | None:
    """None when NIXL can be used here, else a sentence."""
    _leave_out_idle_modules()
    try:
        import nixl._api  # noqa: F401
    except ImportError as error:
        return f'NIXL unavailable, because it cannot be imported ({error}); pip install "mooncache[nixl]"'
    return None


def make_agent(name: str, backend: str = "UCX") -> object:
    """A NIXL agent with one plugin. Raises TransportUnavailable with the reason."""
    if reason := unavailable_reason():
        raise TransportUnavailable(reason)
    from nixl._api import nixl_agent, nixl_agent_config

    try:
        return nixl_agent(name, nixl_agent_config(backends=[backend]))
    except Exception as error:
        raise TransportUnavailable(
            f"NIXL unavailable, because its plugin {backend} failed: {error}"
        ) from error


def _address(memory: Any) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(memory))


@dataclass(slots=True)
class _Region:
    handle: Any
    memory: memoryview  # keeps it alive
    uses: int = 0


class NixlNode:
    """Memory of this process that peers may read and write; kept alive while it is registered."""

    def __init__(self, agent: Any) -> None:
        self._agent = agent
        self._regions: dict[tuple[int, int], _Region] = {}

    def register(self, memory: memoryview) -> Extent:
        """Raises InvalidArgument for memory without a byte. The same memory may be registered again, as with the native
        transports: it stays registered until `unregister` was called as often.
        """
        if memory.readonly or not memory.nbytes:
            raise InvalidArgument("NIXL registers writable memory of at least one byte.")
        key = (_address(memory), memory.nbytes)
        if (region := self._regions.get(key)) is None:
            handle = self._agent.register_memory([(*key, 0, "")], "DRAM")
            region = self._regions[key] = _Region(handle, memory)
        region.uses += 1
        return Extent(*key, writable=True)

    def unregister(self, extent: Extent) -> bool:
        """False when it was not registered. Peers that fetch the metadata afterwards no longer see it."""
        key = (extent.address, extent.size_bytes)
        if (region := self._regions.get(key)) is None:
            return False
        region.uses -= 1
        if region.uses == 0:
            del self._regions[key]
            self._agent.deregister_memory(region.handle)
        return True

    @property
    def metadata(self) -> bytes:
        """What a peer needs to reach all that is registered now. As confidential as the memory itself."""
        return bytes(self._agent.get_agent_metadata())

    def close(self) -> None:
        while self._regions:
            self.unregister(Extent(*next(iter(self._regions)), writable=True))


@dataclass(slots=True)
class _Piece:
    """Part of a transfer in one slot, handed to NIXL."""

    pending: _Pending | None  # None: cancelled, only the slot is waited for
    slot: int
    begin: int
    size_bytes: int
    handle: Any


@dataclass(slots=True)
class _Pending:
    transfer: Transfer
    size_bytes: int
    code: int = 0
    started: int = 0  # bytes handed to NIXL
    open_pieces: int = 0
    crcs: dict[int, tuple[int, int]] = field(default_factory=dict)  # begin -> (crc, bytes)

    @property
    def over(self) -> bool:
        return not self.open_pieces and (self.code != 0 or self.started == self.size_bytes)


class NixlLink:
    """A link over NIXL; implements mooncache.fabrics.contract.Link."""

    def __init__(self, agent: Any, metadata: bytes, slots: int = 16) -> None:
        """Raises TransportUnavailable when the peer's metadata is of no use."""
        self._agent = agent
        try:
            name = agent.add_remote_agent(metadata)
        except Exception as error:
            raise TransportUnavailable(f"NIXL rejected the peer's metadata: {error}") from error
        self._peer = name.decode() if isinstance(name, bytes) else name
        self._memory = mmap.mmap(-1, slots * SLOT_BYTES)
        self._view = memoryview(self._memory)
        self._base = _address(self._memory)
        self._region = agent.register_memory([(self._base, slots * SLOT_BYTES, 0, "")], "DRAM")
        self._free = list(range(slots))
        self._queue: deque[_Pending] = deque()
        self._pieces: list[_Piece] = []
        self._done: list[Completion] = []
        self._closed = False
        self._dead = False

    @property
    def healthy(self) -> bool:
        return not self._closed and not self._dead

    def submit(self, transfers: Sequence[Transfer]) -> int:
        taken = 0
        for transfer in transfers:
            if len(self._queue) + len(self._done) >= MAX_IN_FLIGHT:
                break
            size = sum(piece.nbytes for piece in transfer.local)
            pending = _Pending(transfer, size)
            if self._closed:
                pending.code = Closed.code
            elif (
                not 0 <= transfer.offset <= transfer.remote.size_bytes - size
                or len(transfer.local) > MAX_SLICES
            ):
                pending.code = InvalidArgument.code
            elif transfer.write and not transfer.remote.writable:
                pending.code = PermissionDenied.code
            self._queue.append(pending)
            taken += 1
        return taken

    def poll(self, deadline_s: float) -> list[Completion]:
        while True:
            self._start_pieces()
            moved = self._reap()
            self._finish()
            if self._done:
                done, self._done = self._done, []
                return done
            if not self._queue or time.monotonic() >= deadline_s:
                return []
            if not moved:
                time.sleep(_PAUSE_S)

    def cancel(self, transfer_id: int) -> bool:
        for pending in self._queue:
            if pending.transfer.transfer_id == transfer_id:
                self._queue.remove(pending)
                self._abandon(pending)
                self._done.append(Completion(transfer_id, Cancelled.code, 0, 0))
                return True
        return False

    def close(self) -> None:
        self._closed = True
        for pending in self._queue:
            pending.code = pending.code or Closed.code
            self._abandon(pending)

    def release(self, timeout_s: float = 5.0) -> None:
        """After close(): wait until NIXL is through with the slots, then give them and the peer back.

        Slots that it never lets go of are left to the process: memory that a device may write is not freed.
        """
        self.close()
        end_s = time.monotonic() + timeout_s
        while self._pieces and time.monotonic() < end_s:
            if not self._reap():
                time.sleep(_PAUSE_S)
        region, self._region = self._region, None
        if self._pieces and region is not None:
            _left_behind.append(self._memory)
        elif region is not None:
            self._agent.deregister_memory(region)
        with contextlib.suppress(Exception):
            self._agent.remove_remote_agent(self._peer)

    # --- pieces ----------------------------------------------------------------------------------------------

    def _slot(self, number: int, size_bytes: int) -> memoryview:
        begin = number * SLOT_BYTES
        return self._view[begin : begin + size_bytes]

    def _start_pieces(self) -> None:
        for pending in self._queue:
            if self._dead:
                pending.code = pending.code or ConnectionLost.code
            while self._free and not pending.code and pending.started < pending.size_bytes:
                self._start(pending)
            if not self._free:
                return

    def _start(self, pending: _Pending) -> None:
        transfer = pending.transfer
        begin = pending.started
        size = min(SLOT_BYTES, pending.size_bytes - begin)
        number = self._free.pop()
        if transfer.write:
            memory = self._slot(number, size)
            _copy(transfer.local, begin, memory, into_slot=True)
            pending.crcs[begin] = (_native.crc32c(memory), size)
        here = self._base + number * SLOT_BYTES
        there = transfer.remote.address + transfer.offset + begin
        handle = None
        try:
            handle = self._agent.initialize_xfer(
                "WRITE" if transfer.write else "READ",
                self._agent.get_xfer_descs([(here, size, 0)], "DRAM"),
                self._agent.get_xfer_descs([(there, size, 0)], "DRAM"),
                self._peer,
            )
            self._agent.transfer(handle)
        except Exception as error:  # noqa: BLE001 - its exceptions have no common base but this
            if handle is not None:
                self._let_go(handle)
            self._free.append(number)
            self._fail(pending, error)
            return
        pending.started += size
        pending.open_pieces += 1
        self._pieces.append(_Piece(pending, number, begin, size, handle))

    def _let_go(self, handle: object) -> None:
        with contextlib.suppress(Exception):  # of a transfer that is over: its outcome is known already
            self._agent.release_xfer_handle(handle)

    def _fail(self, pending: _Pending | None, error: Exception | None) -> None:
        """error: what NIXL raised, None for a transfer that ended in an error: its fabric does not work."""
        lost = error is None or any(word in type(error).__name__ for word in ("Disconnect", "Backend"))
        self._dead = self._dead or lost
        if pending is not None:
            pending.code = pending.code or (ConnectionLost.code if lost else InvalidArgument.code)

    def _reap(self) -> bool:
        """Collect finished transfers from NIXL. Returns True when there was one."""
        still = []
        for piece in self._pieces:
            error: Exception | None = None
            try:
                state = self._agent.check_xfer_state(piece.handle)
            except Exception as problem:  # noqa: BLE001 - as above
                state, error = "ERR", problem
            if state == _UNDER_WAY:
                still.append(piece)
                continue
            pending = piece.pending
            if pending is not None:
                pending.open_pieces -= 1
            if state != "DONE":
                self._fail(pending, error)
            elif pending is not None and not pending.transfer.write and not pending.code:
                memory = self._slot(piece.slot, piece.size_bytes)
                _copy(pending.transfer.local, piece.begin, memory, into_slot=False)
                pending.crcs[piece.begin] = (_native.crc32c(memory), piece.size_bytes)
            self._let_go(piece.handle)
            self._free.append(piece.slot)
        moved = len(still) < len(self._pieces)
        self._pieces = still
        return moved

    def _abandon(self, pending: _Pending) -> None:
        for piece in self._pieces:
            if piece.pending is pending:
                piece.pending = None
        pending.open_pieces = 0

    def _finish(self) -> None:
        while self._queue and self._queue[0].over:
            pending = self._queue.popleft()
            crc, moved = 0, 0
            for _, (piece_crc, size) in sorted(pending.crcs.items()):
                crc = _native.crc32c_combine(crc, piece_crc, size)
                moved += size
            ok = pending.code == 0
            identity = pending.transfer.transfer_id
            self._done.append(Completion(identity, pending.code, moved if ok else 0, crc if ok else 0))


def _copy(slices: Sequence[memoryview], begin: int, slot: memoryview, *, into_slot: bool) -> None:
    """Bytes [begin, begin + len(slot)) of the slices, to or from `slot`."""
    at = 0
    for piece in slices:
        size = piece.nbytes
        if begin >= size:
            begin -= size
            continue
        take = min(size - begin, slot.nbytes - at)
        if not take:
            return
        if into_slot:
            slot[at : at + take] = piece[begin : begin + take]
        else:
            piece[begin : begin + take] = slot[at : at + take]
        at, begin = at + take, 0
