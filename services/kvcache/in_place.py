"""An engine's KV memory, registered with the pool's client, so that RDMA devices read and write blocks where they lie.

Idea: the tensors live as long as the engine, so they are registered once, when the client is connected and before the
first block moves, and given back at the end. Blocks whose memory is not registered go through staging memory; a refusal
is one line in the log and costs nothing else.

The invariant: what is registered stays mapped until `close()`, because a device may move bytes of it at any moment of
a call.
"""

from __future__ import annotations

import contextlib
import threading
import time
import weakref
from enum import StrEnum
from typing import TYPE_CHECKING

from mooncache.errors import Closed
from mooncache.runtime.logs import Event, get_logger

if TYPE_CHECKING:
    from collections.abc import Sequence

    from mooncache.kvcache.memory import BlockMemory
    from mooncache.kvcache.pool_link import PoolClient, Registered

_log = get_logger(__name__)
PATH_TEXT = (
    "Bytes of blocks {} the pool by path: in place (straight out of or into the engine's memory), "
    "or staged (copied through a buffer between)."
)


class BlockPath(StrEnum):
    """How a block's bytes went between the engine's memory and the pool. Labels of metrics."""

    IN_PLACE = "in_place"
    STAGED = "staged"


def by_path(moved_bytes: int, staged_bytes: int) -> tuple[tuple[BlockPath, int], ...]:
    """Bytes that moved, by the way that they took."""
    return (BlockPath.IN_PLACE, moved_bytes - staged_bytes), (BlockPath.STAGED, staged_bytes)


class RegisteredMemory:
    """Registers the buffers of `memory` with each client that it is called with.

    Args:
        memory: the engine's blocks.
        bytes_max: more is not registered; 0 registers nothing.
    """

    def __init__(self, memory: BlockMemory, bytes_max: int) -> None:
        self._memory = memory
        self._bytes_max = bytes_max
        self._lock = threading.Lock()
        self._registered: list[tuple[weakref.ref[PoolClient], Registered]] = []
        self._closed = False

    def __call__(self, client: PoolClient) -> None:
        """Register what can be; a client without RDMA, or a device that refuses, stages blocks as before."""
        buffers = self._memory.buffers()
        if not buffers or not self._bytes_max:
            return
        self._drop_gone()
        size_bytes, begun_s = sum(buffer.nbytes for buffer in buffers), time.monotonic()
        why = ""
        if size_bytes > self._bytes_max:
            why = f"they have {size_bytes} bytes, and connector.registered_bytes_max is {self._bytes_max}"
        else:
            why = self._register(client, buffers)
        if why:
            self._release(client)
            _log.info(Event.CONNECTOR_STAGED, reason=why, bytes=size_bytes)
        else:
            seconds = round(time.monotonic() - begun_s, 3)
            _log.info(Event.CONNECTOR_IN_PLACE, buffers=len(buffers), bytes=size_bytes, seconds=seconds)

    def _register(self, client: PoolClient, buffers: Sequence[memoryview]) -> str:
        """Why some buffer cannot be registered: then none is, because a block has a part in each."""
        for buffer in buffers:
            try:
                made = client.register_buffer(buffer)
                with self._lock:
                    if self._closed:
                        made.close()
                        return "the engine ends"
                    self._registered.append((weakref.ref(client), made))
                made.attach()
            except Exception as error:  # noqa: BLE001  (whatever is wrong with devices, the engine serves)
                return str(error)
        return ""

    def _drop_gone(self) -> None:
        """Forget what clients of tenants had that were closed since."""
        with self._lock:
            self._registered = [known for known in self._registered if known[0]() is not None]

    def _release(self, client: PoolClient | None = None) -> None:
        """Give back what a client has registered; without one, what all have."""
        with self._lock:
            over = [known for known in self._registered if client is None or known[0]() is client]
            self._registered = [known for known in self._registered if known not in over]
        for _, one in over:
            with contextlib.suppress(Closed):
                one.close()

    def close(self) -> None:
        """From now on no device knows the memory. Calls that use it must have ended."""
        with self._lock:
            self._closed = True
        self._release()
