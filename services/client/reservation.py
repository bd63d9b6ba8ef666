"""A block that is written range by range: invisible until its commit, gone with the connection that made it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from types import TracebackType
from typing import TYPE_CHECKING, Self

from mooncache.client.buffers import Buffer, to_host_source
from mooncache.client.native_call import call_native
from mooncache.errors import Closed, InvalidArgument

if TYPE_CHECKING:
    from mooncache._native import Reservation as NativeReservation


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
        if isinstance(offset, bool) or not isinstance(offset, int) or not 0 <= offset < self._size_bytes:
            raise InvalidArgument(f"offset must be between 0 and {self._size_bytes - 1}; got {offset!r}.")
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
