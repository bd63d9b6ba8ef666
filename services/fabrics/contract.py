"""The contract of a transport, as native/include/mooncache/transport.h states it, for transports in Python.

The invariant is the same: bytes of the caller are moved by the thread that calls `poll`, and by no other; after
`cancel` or `close` returned, not one byte of the affected transfers is read or written. Completions come in the order
of submission, except for cancelled ones, which may overtake.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class Extent:
    """Memory that a peer granted: its address over there, bytes, and whether it may be written."""

    address: int
    size_bytes: int
    writable: bool


@dataclass(frozen=True, slots=True)
class Transfer:
    """From `offset` of the extent into the slices of `local` (read), or from them to there (`write`)."""

    transfer_id: int
    write: bool
    remote: Extent
    local: Sequence[memoryview]
    offset: int = 0


@dataclass(frozen=True, slots=True)
class Completion:
    """How one transfer ended."""

    transfer_id: int
    code: int  # 0 or a number of mooncache.errors
    size_bytes: int
    crc32c: int  # of the bytes moved


class Link(Protocol):
    """One connection to one peer, used by one thread at a time."""

    def submit(self, transfers: Sequence[Transfer]) -> int:
        """Submit transfers until the queue is full. Returns how many; impossible ones complete with their code."""

    def poll(self, deadline_s: float) -> list[Completion]:
        """Move bytes until a completion is there or time.monotonic() passed `deadline_s`."""

    def cancel(self, transfer_id: int) -> bool:
        """False when no such transfer is under way."""

    def close(self) -> None:
        """What is queued completes with CLOSED at the next poll."""
