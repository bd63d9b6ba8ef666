"""The other end: a peer's regions, transfers to and from them, and notifications."""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from collections.abc import Generator, Iterable
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Self

from mooncache.client.buffers import Buffer
from mooncache.client.native_call import call_native
from mooncache.errors import DeadlineExceeded, InvalidArgument, NotFound
from mooncache.transfer.region import EngineRegion, checked_timeout

if TYPE_CHECKING:
    from mooncache import _native

LocalMemory = Buffer | tuple[EngineRegion, int] | int
RANGES_MAX = 1 << 20
_WAIT_SLICE_S = 0.5


@dataclass(frozen=True, slots=True)
class Notification:
    """What a peer has sent with `EnginePeer.notify`."""

    peer: str
    """The name that it proved."""
    data: bytes


@dataclass(frozen=True, slots=True)
class RemoteRegion:
    """A region of a peer, as far as this engine may use it."""

    address: int
    size_bytes: int
    readable: bool
    """Some range of it, at least."""
    writable: bool
    mappable: bool
    """Engines on the same host copy it through shared memory."""
    label: str

    def at(self, offset: int) -> int:
        """The address of a byte. Raises InvalidArgument: it is beyond the end."""
        if not 0 <= offset <= self.size_bytes:
            raise InvalidArgument(f"Offset {offset} is not inside the region of {self.size_bytes} bytes.")
        return self.address + offset


class RangeTransfer:
    """A batch of ranges on its way. It ends by itself; when this object is collected before, it is cancelled.

    `await transfer` waits without blocking the event loop; cancelling that task cancels the transfer.
    """

    def __init__(self, native: _native.EngineTransfer) -> None:
        self._native = native

    @property
    def done(self) -> bool:
        """Whether it has ended, in whatever way."""
        return self._native.done()

    @property
    def route(self) -> str:
        """How its bytes go: "shm", "unix" or "tcp"; empty before it begins."""
        return self._native.route()

    def wait(self, timeout_s: float | None = None) -> None:
        """Wait until all bytes are in place, and their checksums were compared.

        Args:
            timeout_s: of this wait; None waits until the transfer's own time limit at most.

        Raises:
            DeadlineExceeded: this wait, or the transfer, took too long; `done` tells which.
            Cancelled: `cancel` was called.
            NotFound, PermissionDenied: a range is in no region, or may not be used; it may have been taken back in
                the middle.
            ChecksumMismatch: bytes were damaged, or their owner changed them while they were read.
            NodeUnavailable, ConnectionLost, StaleIncarnation: the peer is gone, or was started again.
        """
        end_s = math.inf if timeout_s is None else time.monotonic() + checked_timeout(timeout_s)
        while not self._native.done() and (left_s := end_s - time.monotonic()) > 0:
            # In slices, so that Ctrl-C is heard.
            with contextlib.suppress(DeadlineExceeded):
                call_native(self._native.wait, min(_WAIT_SLICE_S, left_s))
        call_native(self._native.wait, 0.0)

    def cancel(self) -> None:
        """End it. When this returns, no byte of local memory moves.

        What a write has sent already may still arrive in the peer's ranges.
        """
        call_native(self._native.cancel)

    async def wait_async(self, timeout_s: float | None = None) -> None:
        """As `wait`, for asyncio."""
        try:
            await asyncio.to_thread(self.wait, timeout_s)
        except asyncio.CancelledError:
            self.cancel()
            raise

    def __await__(self) -> Generator[None, None, None]:
        return self.wait_async().__await__()


class EnginePeer:
    """A connection to one engine, made by `TransferEngine.connect`. For use from any thread.

    Its transfers are carried out one after the other, by a thread of its own; connect twice for two at once.
    """

    def __init__(self, native: _native.EnginePeer, default_timeout_s: float) -> None:
        self._native = native
        self._timeout_s = default_timeout_s

    @property
    def name(self) -> str:
        """The name of the engine, which it has proved."""
        return self._native.name()

    @property
    def regions(self) -> tuple[RemoteRegion, ...]:
        """What this engine may use there, as of `connect` or `refresh`."""
        return tuple(RemoteRegion(*row) for row in self._native.regions())

    def region(self, label: str) -> RemoteRegion:
        """The one region with this label. Raises NotFound: there is none, or several."""
        found = [region for region in self.regions if region.label == label]
        if len(found) != 1:
            raise NotFound(
                f"{len(found)} regions of {self.name!r} that this engine may use are called {label!r}."
            )
        return found[0]

    def refresh(self, timeout_s: float | None = None) -> None:
        """Ask the peer for its regions again. Raises as `RangeTransfer.wait`."""
        call_native(self._native.refresh, checked_timeout(timeout_s, self._timeout_s))

    def read(
        self, ranges: Iterable[tuple[LocalMemory, int, int]], timeout_s: float | None = None
    ) -> RangeTransfer:
        """Begin to read ranges of the peer into local memory: (local, remote address, bytes) of each.

        Local memory is a writable buffer, (region, offset) of this engine, or the address of memory that the caller
        keeps until the transfer has ended.

        Raises:
            InvalidArgument: a range is longer than its memory.
            LimitExceeded: too many transfers are waiting.
            Closed: the connection, or the engine, is closed.
        """
        return self._begin(False, ranges, timeout_s)

    def write(
        self, ranges: Iterable[tuple[LocalMemory, int, int]], timeout_s: float | None = None
    ) -> RangeTransfer:
        """Begin to write local memory to ranges of the peer, as `read`. Ranges of one batch must not overlap."""
        return self._begin(True, ranges, timeout_s)

    def _begin(
        self, write: bool, ranges: Iterable[tuple[LocalMemory, int, int]], timeout_s: float | None
    ) -> RangeTransfer:
        copies = [(_memory_of(local, size), remote, size) for local, remote, size in ranges]
        if len(copies) > RANGES_MAX:
            raise InvalidArgument(f"A transfer has {RANGES_MAX} ranges at most; got {len(copies)}.")
        limit_s = checked_timeout(timeout_s, self._timeout_s)
        return RangeTransfer(call_native(self._native.submit, write, copies, limit_s))

    def notify(self, data: Buffer, timeout_s: float | None = None) -> None:
        """Send at most 64 KiB to `TransferEngine.notifications` of the peer, after all transfers begun before.

        It is sent once: after a lost connection it is unknown whether it has arrived.

        Raises:
            BackPressure: the peer does not take its notifications.
            TooLarge, NodeUnavailable, ConnectionLost, DeadlineExceeded.
        """
        call_native(self._native.notify, data, checked_timeout(timeout_s, self._timeout_s))

    def close(self) -> None:
        """End the connection; transfers under way end with CANCELLED. Twice is harmless."""
        self._native.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _memory_of(local: LocalMemory, size: int) -> Buffer | int:
    if isinstance(local, tuple):
        region, offset = local
        if not 0 <= offset <= region.size_bytes - size:
            raise InvalidArgument(
                f"{size} bytes at {offset} are not inside region {region.label!r} of {region.size_bytes} bytes."
            )
        return region.buffer[offset : offset + size]
    return local
