"""A buffer of the caller that RDMA devices read and write in place, without a copy through the client's own memory.

The invariant: as long as it is registered, its export is held, so it cannot be freed, resized or unmapped (of GPU
memory, which has no export, the array); after `close()` no device knows it. An address alone is never enough for a
registration to be used.
"""

from __future__ import annotations

from types import TracebackType
from typing import TYPE_CHECKING, Self

from mooncache.client.native_call import call_native

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

    def attach(self) -> None:
        """Hand it to this machine's RDMA devices now, to stay so until `close()`, beside the client's limits.

        Without this call it is registered when a device can use it first, and may make room for other buffers.

        Raises:
            TransportUnavailable: the devices cannot use it, and why; its bytes are staged.
            Closed: the buffer, or its client, is closed.
        """
        call_native(self._native.attach)

    def close(self) -> None:
        """Let go of the buffer; twice is harmless. A call that still uses it is not disturbed."""
        self._native.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
