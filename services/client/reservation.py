"""Blocks that are written range by range: invisible until their commit, gone with the connection that made them.

One block (`Reservation`) or many of one size (`ReservationBatch`), which are written and committed in one call.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, NamedTuple, Self

from mooncache._native import StagedTally
from mooncache.client.buffers import Buffer, to_host_source, to_view
from mooncache.client.native_call import call_native
from mooncache.client.results import BatchResult, ClusterView, PutResult
from mooncache.errors import OK, AlreadyExists, Closed, InvalidArgument

if TYPE_CHECKING:
    from mooncache._native import Reservation as NativeReservation
    from mooncache._native import ReservationBatch as NativeBatch


def _check_offset(offset: int, size_bytes: int) -> None:
    if isinstance(offset, bool) or not isinstance(offset, int) or not 0 <= offset < size_bytes:
        raise InvalidArgument(f"offset must be between 0 and {size_bytes - 1}; got {offset!r}.")


class _Core:
    """What both reservations share: the native handle and whether it is finished."""

    def __init__(self, native: NativeReservation, timeout_s: float, size_bytes: int) -> None:
        self._native = native
        self._timeout_s = timeout_s
        self._size_bytes = size_bytes
        self._finished = False

    @property
    def size_bytes(self) -> int:
        """Size of the block."""
        return self._size_bytes

    @property
    def finished(self) -> bool:
        """True after commit or abort."""
        return self._finished

    def _write(self, offset: int, data: Buffer, timeout_s: float | None) -> None:
        if self._finished:
            raise Closed("The reservation is finished. Reserve again.")
        _check_offset(offset, self._size_bytes)
        call_native(self._native.write, offset, to_host_source(data), timeout_s or self._timeout_s)

    def _commit(self, timeout_s: float | None) -> None:
        if self._finished:
            raise Closed("The reservation is finished. Reserve again.")
        self._finished = True
        call_native(self._native.commit, timeout_s or self._timeout_s)

    def _abort(self) -> None:
        if not self._finished:
            self._finished = True
            call_native(self._native.abort)


class Reservation(_Core):
    """Made by `Client.reserve`. As a context manager it commits on leaving, and aborts when an exception passes.

    with client.reserve("k", 3 * n) as block:
        block.write(0, layer_0)
        block.write(n, layer_1)
        block.write(2 * n, layer_2)
    """

    def write(self, offset: int, data: Buffer, *, timeout_s: float | None = None) -> None:
        """Write `data` (buffer or list of buffers) at byte `offset`. Ranges must not overlap.

        Raises:
            InvalidArgument: outside of the block, or overlapping.
            ConnectionLost: the node is gone, and the reservation with it.
        """
        self._write(offset, data, timeout_s)

    def commit(self, *, timeout_s: float | None = None) -> None:
        """Make the block visible.

        Raises:
            Incomplete: some range was never written; the reservation is gone.
            AlreadyExists: another writer committed the key first.
        """
        self._commit(timeout_s)

    def abort(self) -> None:
        """Give the space back. Harmless when the reservation is finished."""
        self._abort()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is not None:
            self.abort()
        elif not self.finished:
            self.commit()


RunBlocking = Callable[[Callable[[], None]], Awaitable[None]]
"""Runs a blocking function on the client's threads."""


class AsyncReservation(_Core):
    """Made by `AsyncClient.reserve`; the asyncio twin of `Reservation` (use `async with`)."""

    def __init__(
        self, native: NativeReservation, timeout_s: float, size_bytes: int, run: RunBlocking
    ) -> None:
        super().__init__(native, timeout_s, size_bytes)
        self._run = run

    async def write(self, offset: int, data: Buffer, *, timeout_s: float | None = None) -> None:
        """Write `data` (buffer or list of buffers) at byte `offset`, as `Reservation.write` does."""
        await self._run(lambda: self._write(offset, data, timeout_s))

    async def commit(self, *, timeout_s: float | None = None) -> None:
        """Make the block visible, as `Reservation.commit` does."""
        await self._run(lambda: self._commit(timeout_s))

    async def abort(self) -> None:
        """Give the space back. Harmless when the reservation is finished."""
        await self._run(self._abort)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is not None:
            await asyncio.shield(self.abort())
        elif not self.finished:
            await self.commit()


class StridedBuffer(NamedTuple):
    """Where blocks have a part of their bytes in one buffer, as a layer's tensor has those of all blocks."""

    buffer: Buffer
    step_bytes: int
    """From one place to the next one."""
    ranges: Sequence[tuple[int, int]]
    """(offset, bytes) of the parts at each place, in the order in which the block has them."""


class _BatchCore:
    """What both batches of reservations share."""

    def __init__(self, native: NativeBatch, timeout_s: float, view: Callable[[], ClusterView]) -> None:
        self._native = native
        self._timeout_s = timeout_s
        self._view = view

    def __len__(self) -> int:
        return len(self._native)

    @property
    def block_bytes(self) -> int:
        """Size of each block."""
        return self._native.block_bytes

    @property
    def codes(self) -> tuple[int, ...]:
        """For each block 0 while it can be written, else why not: what refused it (ALREADY_EXISTS, NO_SPACE, ...),
        or CLOSED and CONNECTION_LOST once it has ended."""
        return tuple(self._native.codes)

    def _write(self, offset: int, values: Sequence[Buffer | None], timeout_s: float | None) -> BatchResult:
        _check_offset(offset, self.block_bytes)
        if len(values) != len(self):
            raise InvalidArgument(f"As many values as blocks are needed; got {len(values)} for {len(self)}.")
        sources = [() if value is None else to_host_source(value) for value in values]
        limit_s, tally = timeout_s or self._timeout_s, StagedTally()
        codes = call_native(self._native.write, offset, sources, limit_s, None, tally)
        return BatchResult(tuple(codes), staged_bytes=tally.bytes)

    def _write_gathered(
        self, offset: int, source: StridedBuffer, places: Sequence[int | None], timeout_s: float | None
    ) -> BatchResult:
        _check_offset(offset, self.block_bytes)
        limit_s, tally = timeout_s or self._timeout_s, StagedTally()
        buffer, step_bytes, ranges = to_view(source.buffer, writable=False), source.step_bytes, source.ranges
        codes = call_native(
            self._native.write_gathered,
            offset,
            buffer,
            list(places),
            step_bytes,
            list(ranges),
            limit_s,
            None,
            tally,
        )
        return BatchResult(tuple(codes), staged_bytes=tally.bytes)

    def _commit(self, timeout_s: float | None) -> PutResult:
        found = call_native(self._native.commit, timeout_s or self._timeout_s)
        return PutResult(
            tuple(OK if code == AlreadyExists.code else code for code in found),
            tuple(code == OK for code in found),
            tuple(map(self._view().node_name, self._native.nodes)),
        )

    def _abort(self) -> None:
        call_native(self._native.abort)


class ReservationBatch(_BatchCore):
    """Made by `Client.reserve_many`: blocks of one size, written and committed many in one call.

    What fails for one block ends that block only. Dropping the batch gives the space of what is open back.

    batch = client.reserve_many(keys, len(layers) * n)
    for number, layer in enumerate(layers):
        batch.write(number * n, [layer[i] for i in range(len(keys))])
    batch.commit()

    Where a layer is one tensor, a call needs no list of its rows:

        batch.write_gathered(number * n, StridedBuffer(layer, n, [(0, n)]), range(len(keys)))
    """

    def write(
        self, offset: int, values: Sequence[Buffer | None], *, timeout_s: float | None = None
    ) -> BatchResult:
        """Write `values[i]` (buffer, list of buffers, or None for nothing) at byte `offset` of block i.

        Ranges of a block must not overlap. The result has a code for each block: 0, or why it is not open (see
        `codes`), or what ended it now.

        Raises:
            InvalidArgument: outside of the blocks, or overlapping; nothing was written.
        """
        return self._write(offset, values, timeout_s)

    def write_gathered(
        self,
        offset: int,
        source: StridedBuffer,
        places: Sequence[int | None],
        *,
        timeout_s: float | None = None,
    ) -> BatchResult:
        """Write of block i what `source` has at `places[i]` (None: nothing) at byte `offset`, else as `write`.

        Cheaper than as many values, where one buffer has the ranges of all blocks.

        Raises:
            InvalidArgument: also for ranges outside of the buffer; nothing was written.
        """
        return self._write_gathered(offset, source, places, timeout_s)

    def commit(self, *, timeout_s: float | None = None) -> PutResult:
        """Make the blocks visible. One code for each; INCOMPLETE where a range was never written."""
        return self._commit(timeout_s)

    def abort(self) -> None:
        """Give the space of all open blocks back. Harmless when none is."""
        self._abort()


class AsyncReservationBatch(_BatchCore):
    """Made by `AsyncClient.reserve_many`; the asyncio twin of `ReservationBatch`."""

    def __init__(
        self,
        native: NativeBatch,
        timeout_s: float,
        view: Callable[[], ClusterView],
        run: Callable[[Callable[[], Any]], Awaitable[Any]],
    ) -> None:
        super().__init__(native, timeout_s, view)
        self._run = run

    async def write(
        self, offset: int, values: Sequence[Buffer | None], *, timeout_s: float | None = None
    ) -> BatchResult:
        """Write a range of many blocks, as `ReservationBatch.write`."""
        result: BatchResult = await self._run(lambda: self._write(offset, values, timeout_s))
        return result

    async def write_gathered(
        self,
        offset: int,
        source: StridedBuffer,
        places: Sequence[int | None],
        *,
        timeout_s: float | None = None,
    ) -> BatchResult:
        """Write ranges of one buffer, as `ReservationBatch.write_gathered`."""
        result: BatchResult = await self._run(lambda: self._write_gathered(offset, source, places, timeout_s))
        return result

    async def commit(self, *, timeout_s: float | None = None) -> PutResult:
        """Make the blocks visible, as `ReservationBatch.commit`."""
        result: PutResult = await self._run(lambda: self._commit(timeout_s))
        return result

    async def abort(self) -> None:
        """Give the space of all open blocks back. Harmless when none is."""
        await self._run(self._abort)
