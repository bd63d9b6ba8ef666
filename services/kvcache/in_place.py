"""An engine's KV memory, registered with the pool's client, so that RDMA devices read and write blocks where they lie.

Idea: the tensors live as long as the engine, so they are registered once, when the client is connected and before the
first block moves, and given back at the end. Blocks of a GPU pass through pinned buffers, which come with the threads
that move blocks: each is registered before its first use. Blocks whose memory is not registered go through staging
memory; a refusal is one line in the log and costs nothing else.

The invariant: what is registered stays mapped until `close()`, because a device may move bytes of it at any moment of
a call.
"""

from __future__ import annotations

import contextlib
import ctypes
import threading
import time
import weakref
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Protocol

from mooncache.errors import Closed
from mooncache.runtime.logs import Event, get_logger

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from mooncache.kvcache.pool_link import PoolClient, Registered

_log = get_logger(__name__)
PATH_TEXT = (
    "Bytes of blocks {} the pool by path: in place (straight out of or into the engine's memory), "
    "or staged (copied through a buffer between)."
)

THROUGH_REGISTERED = (
    "the engine's blocks are copied through host buffers of their own, which RDMA devices use in place"
)
BufferPlace = tuple[int, int]
"""Address and bytes of a buffer."""


class BlockPath(StrEnum):
    """How a block's bytes went between the engine's memory and the pool. Labels of metrics."""

    IN_PLACE = "in_place"
    STAGED = "staged"


def by_path(moved_bytes: int, staged_bytes: int) -> tuple[tuple[BlockPath, int], ...]:
    """Bytes that moved, by the way that they took."""
    return (BlockPath.IN_PLACE, moved_bytes - staged_bytes), (BlockPath.STAGED, staged_bytes)


class Registrable(Protocol):
    """What is needed of an engine's memory here; `mooncache.kvcache.memory.BlockMemory` has it."""

    is_staged: bool

    def buffers(self) -> Sequence[memoryview]: ...

    def on_new_buffers(self, changed: Callable[[], None]) -> None: ...


@dataclass(frozen=True, slots=True)
class _Registration:
    client: weakref.ref[PoolClient]
    place: BufferPlace
    handle: Registered


class RegisteredMemory:
    """Registers the buffers of `memory` with each client that it is called with, and those that come later.

    Args:
        memory: the engine's blocks.
        bytes_max: more is not registered; 0 registers nothing.
    """

    def __init__(self, memory: Registrable, bytes_max: int) -> None:
        self._memory = memory
        self._bytes_max = bytes_max
        self._lock = threading.Lock()
        self._one_at_a_time = threading.Lock()
        self._clients: list[weakref.ref[PoolClient]] = []
        self._registered: list[_Registration] = []
        self._closed = False
        memory.on_new_buffers(self._follow)

    def __call__(self, client: PoolClient) -> None:
        """Register what can be; a client without RDMA, or a device that refuses, stages blocks as before."""
        with self._lock:
            # Clients of tenants come and go.
            self._clients = [known for known in self._clients if known() is not None]
            self._registered = [one for one in self._registered if one.client() is not None]
            if all(known() is not client for known in self._clients):
                self._clients.append(weakref.ref(client))
        with self._one_at_a_time:
            self._register_all(client)

    def _follow(self) -> None:
        """The memory has other buffers."""
        with self._lock:
            clients = [client for known in self._clients if (client := known()) is not None]
        for client in clients:
            with self._one_at_a_time:
                self._register_all(client)

    def _register_all(self, client: PoolClient) -> None:
        if not self._bytes_max:
            return
        buffers = {place_of(buffer): buffer for buffer in self._memory.buffers()}
        self._release(lambda one: one.client() is client and one.place not in buffers)
        with self._lock:
            known = {one.place for one in self._registered if one.client() is client}
        new = {place: buffer for place, buffer in buffers.items() if place not in known}
        if not new:
            return
        size_bytes, begun_s = sum(size for _, size in buffers), time.monotonic()
        if size_bytes > self._bytes_max:
            why = f"they have {size_bytes} bytes, and connector.registered_bytes_max is {self._bytes_max}"
        else:
            why = self._register(client, new)
        if why:
            self._release(lambda one: one.client() is client)
            _log.info(Event.CONNECTOR_STAGED, reason=why, bytes=size_bytes)
        elif self._memory.is_staged:
            _log.info(Event.CONNECTOR_STAGED, reason=THROUGH_REGISTERED, bytes=size_bytes)
        else:
            seconds = round(time.monotonic() - begun_s, 3)
            _log.info(Event.CONNECTOR_IN_PLACE, buffers=len(buffers), bytes=size_bytes, seconds=seconds)

    def _register(self, client: PoolClient, buffers: Mapping[BufferPlace, memoryview]) -> str:
        """Why some buffer cannot be registered: then none is, because a block has a part in each."""
        for place, buffer in buffers.items():
            try:
                made = client.register_buffer(buffer)
                with self._lock:
                    if self._closed:
                        made.close()
                        return "the engine ends"
                    self._registered.append(_Registration(weakref.ref(client), place, made))
                made.attach()
            except Exception as error:  # noqa: BLE001  (whatever is wrong with devices, the engine serves)
                return str(error)
        return ""

    def _release(self, over: Callable[[_Registration], bool]) -> None:
        """Give back the registrations of which that is true."""
        with self._lock:
            ended = [one for one in self._registered if over(one)]
            self._registered = [one for one in self._registered if one not in ended]
        for one in ended:
            with contextlib.suppress(Closed):
                one.handle.close()

    def close(self) -> None:
        """From now on no device knows the memory. Calls that use it must have ended."""
        with self._lock:
            self._closed = True
            self._clients = []
        self._release(lambda _: True)


def place_of(buffer: memoryview) -> BufferPlace:
    """Where the buffer lies."""
    return ctypes.addressof(ctypes.c_char.from_buffer(buffer)), buffer.nbytes
