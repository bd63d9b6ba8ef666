"""A region: memory of an engine that peers may reach, and what they may do with it."""

from __future__ import annotations

import math
from collections.abc import Iterable
from types import TracebackType
from typing import TYPE_CHECKING, Final, Self

from mooncache.client.native_call import call_native
from mooncache.errors import InvalidArgument

if TYPE_CHECKING:
    from mooncache import _native

EVERY_PEER: Final = "*"
DEFAULT_TIMEOUT_S: Final = 30.0

Grant = tuple[str, int, int, bool, bool]
"""Peer, offset, bytes (0: to the end), read, write."""


def whole_region_grants(readable_by: str | Iterable[str], writable_by: str | Iterable[str]) -> list[Grant]:
    """Grants over a whole region. A name, several names, or "*" for every peer that has proved one."""
    readers, writers = names_of(readable_by), names_of(writable_by)
    both = list(dict.fromkeys([*readers, *writers]))
    return [(name, 0, 0, name in readers, name in writers) for name in both]


def names_of(peers: str | Iterable[str]) -> list[str]:
    """Names as a list; one name may be given alone."""
    return [peers] if isinstance(peers, str) else list(peers)


def checked_timeout(timeout_s: float | None, default_s: float = DEFAULT_TIMEOUT_S) -> float:
    """A time limit in seconds. Raises InvalidArgument."""
    wanted = default_s if timeout_s is None else timeout_s
    if not (isinstance(wanted, (int, float)) and math.isfinite(wanted) and wanted >= 0):
        raise InvalidArgument(f"timeout_s is a number of seconds, 0 or more; got {timeout_s!r}.")
    return float(wanted)


class EngineRegion:
    """Registered memory. Made by `TransferEngine.allocate`, `register` and `register_file`.

    Attributes:
        address: of its first byte, for peers. It is no pointer, and no other region ever has it, unless `register`
            was given one.
        size_bytes: of the region.
        label: what the owner calls it; peers see it.
    """

    def __init__(
        self,
        native: _native.TransferEngine,
        registered: dict[int, memoryview],
        base: int,
        size_bytes: int,
        label: str,
    ) -> None:
        self._native = native
        self._registered = (
            registered  # of the engine: what peers may reach stays, whoever forgets this object
        )
        self.address = base
        self.size_bytes = size_bytes
        self.label = label

    @property
    def buffer(self) -> memoryview:
        """The memory, for this process. Raises InvalidArgument: the region is closed."""
        memory = self._registered.get(self.address)
        if memory is None:
            raise InvalidArgument(f"Region {self.label!r} is closed.")
        return memory

    def grant(
        self,
        peer: str,
        *,
        offset: int = 0,
        size_bytes: int | None = None,
        readable: bool = False,
        writable: bool = False,
    ) -> None:
        """Let a peer read or write a range; without `size_bytes` up to the end.

        A range is allowed when one grant covers it as a whole; grants do not add up.

        Raises:
            InvalidArgument: the range is not inside the region, or the name is none.
            NotFound: the region is closed.
        """
        size = self.size_bytes - offset if size_bytes is None else size_bytes
        call_native(self._native.grant, self.address, peer, offset, size, readable, writable)

    def revoke(self, peer: str = EVERY_PEER, *, timeout_s: float | None = None) -> None:
        """Take all grants to a peer back; "*": all of them. Its transfers under way end with PERMISSION_DENIED.

        When this returns, no byte moves for that peer. One that has mapped memory of this host to read it
        can still look at it, until the region is closed and its memory freed.

        Raises:
            DeadlineExceeded: it can no longer begin a transfer, but one is still under way.
            InvalidArgument: a named peer cannot be taken out of "*".
            NotFound: the region is closed.
        """
        call_native(self._native.revoke, self.address, peer, checked_timeout(timeout_s))

    def close(self, timeout_s: float | None = None) -> None:
        """Unregister the memory; twice is harmless. When this returns, no peer reads or writes it.

        Raises:
            DeadlineExceeded: no peer finds it, but one still uses it: the memory must not be given to
                anything else before another close() succeeds, or the engine is closed.
        """
        if self.address not in self._registered:
            return
        call_native(self._native.unregister, self.address, checked_timeout(timeout_s))
        self._registered.pop(self.address, None)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
