"""A buffer of the caller that RDMA devices read and write in place, without a copy through the client's own memory.

The invariant: as long as it is registered, its export is held, so it cannot be freed, resized or unmapped (of GPU
memory, which has no export, the array); after `close()` no device knows it. An address alone is never enough for a
registration to be used.
"""

from __future__ import annotations

from types import TracebackType
from typing import TYPE_CHECKING, Self

if TYPE_CHECKING:
    from mooncache._native import Registration


class RegisteredBuffer:
    """Made by `Client.register_buffer`. As a context manager it ends with the block, else with `close()`."""

    def __init__(self, native: Registration) -> None:
        self._native = native

    @property
    def size_bytes(self) -> int:
        """Size of the buffer."""
        return int(self._native.size_bytes)

    def close(self) -> None:
        """Let go of the buffer; twice is harmless. A call that still uses it is not disturbed."""
        self._native.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
