"""The interface that a master elects itself through.

Idea: leadership is a fact with an end. `campaign` returns a Leadership whose `lost` event is set no later than
the moment at which another master may begin to lead: by the local monotonic clock, not by hoping that the backend
answers. Every leadership has a fencing term that is larger than all before it; nodes and clients ignore smaller ones.
"""

from __future__ import annotations

import asyncio
import math
from dataclasses import dataclass, field
from typing import Protocol


@dataclass(frozen=True, slots=True)
class MasterRecord:
    """One master as it published itself."""

    master_id: str
    grpc_target: str
    software_version: str = ""
    host_id: str = ""
    host_name: str = ""
    started_ms: int = 0  # milliseconds since the Unix epoch
    pid: int = 0


@dataclass(slots=True)
class Leadership:
    """A won election. `term` fences; `lost` is set when it is over, for whatever reason, which `reason` tells."""

    term: int
    lost: asyncio.Event = field(default_factory=asyncio.Event)
    reason: str = ""
    until_s: float = math.inf  # of the local monotonic clock; renewals move it

    def holds(self, now_s: float) -> bool:
        """Whether no other process can lead yet, also in a process that was stopped and has not noticed."""
        return not self.lost.is_set() and now_s < self.until_s

    def end(self, reason: str) -> None:
        """Mark it as over; the first reason stays."""
        if not self.lost.is_set():
            self.reason = reason
            self.lost.set()


class Coordinator(Protocol):
    """One master's view of the others. All calls have deadlines of their own and raise MasterUnavailable when the
    backend does not answer, Unauthenticated when it refuses the user."""

    async def start(self, me: MasterRecord) -> None:
        """Publish this master; from now on it is listed while it lives."""
        ...

    async def campaign(self, floor: int = 0) -> Leadership:
        """Wait until this master leads, in a term above `floor`. Cancelling gives the candidacy up. Rides over backend
        outages."""
        ...

    async def leader(self) -> MasterRecord | None:
        """The present leader, None when there is none."""
        ...

    async def masters(self) -> list[MasterRecord]:
        """Every live master, ordered by id."""
        ...

    async def resign(self) -> None:
        """Stop leading at once, so that a standby need not wait for the lease; no-op when not leading."""
        ...

    async def close(self) -> None:
        """Resign, take the published record back, let go of the backend. Never raises."""
        ...

    @property
    def reachable(self) -> bool:
        """Whether the backend answered last time."""
        ...
