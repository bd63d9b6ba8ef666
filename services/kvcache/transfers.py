"""Jobs that engines give to the pool, and reports about them: loads and saves."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final

from mooncache.errors import (
    BackPressure,
    ChecksumMismatch,
    DeadlineExceeded,
    Internal,
    MooncacheError,
    NoSpace,
    NotFound,
    QuotaExceeded,
)
from mooncache.kvcache.core.break_even import Pace
from mooncache.runtime import tracing

AWAITED_PARTS: Final = 4
AWAITED_PART_BYTES_MIN: Final = 1 << 20
"""A save that another instance waits for goes in parts, so that the first are loaded while the others are saved."""


class MoveFailure(StrEnum):
    """Why a block was not loaded or saved. They are labels of metrics."""

    NONE = ""  # it was
    MISSING = "missing"
    CHECKSUM = "checksum"
    TIMEOUT = "timeout"
    UNAVAILABLE = "unavailable"
    WRONG_SIZE = "wrong_size"
    ABSENT = "pool_absent"
    CANCELLED = "cancelled"
    FULL = "full"
    NOT_COME = "not_come"  # another instance was to save it, and did not within the time limit or gave it up
    TOO_SLOW = "too_slow"  # it would have come later than it can be computed
    DIFFERENT = "different"  # the pool had other bytes than the engine computed, and they are removed
    STALE = "stale"  # its key was made for other weights than the engine has now


_REASON_OF_CODE = {
    NotFound.code: MoveFailure.MISSING,
    ChecksumMismatch.code: MoveFailure.CHECKSUM,
    DeadlineExceeded.code: MoveFailure.TIMEOUT,
    NoSpace.code: MoveFailure.FULL,
    BackPressure.code: MoveFailure.FULL,
    QuotaExceeded.code: MoveFailure.FULL,
}


def code_of(error: Exception) -> int:
    """The stable code of what a call raised."""
    return error.code if isinstance(error, MooncacheError) else Internal.code


def reason_of(code: int) -> MoveFailure:
    """The failure that a stable error code stands for."""
    return _REASON_OF_CODE.get(code, MoveFailure.UNAVAILABLE)


@dataclass(frozen=True, slots=True)
class TransferJob:
    """`keys[i]` names the bytes of the engine's block `blocks[i]`."""

    name: str
    keys: tuple[bytes, ...]
    blocks: tuple[int, ...]
    trace: tracing.TraceContext | None = None  # the request's, when it has one
    pace: Pace | None = None  # what a load has to keep, if anything
    awaited: tuple[
        int, ...
    ] = ()  # of a load: positions of blocks that another instance is computing, in rising order
    await_s: float = 0.0  # for so long
    node: str = ""  # where they will be; of a save: the node that should take them
    is_awaited: bool = False  # of a save: another instance waits for the blocks; its waits for lost ones end
    session_token: str = field(
        default="", repr=False
    )  # whose blocks they are; empty: the engine's own tenant

    def blocks_at_once(self, block_bytes: int, bytes_max: int) -> int:
        """How many blocks of a save go to the pool in one call."""
        part_bytes = bytes_max
        if self.is_awaited:
            part_bytes = max(AWAITED_PART_BYTES_MIN, -(-len(self.keys) // AWAITED_PARTS) * block_bytes)
        return max(1, min(bytes_max, part_bytes) // block_bytes)


@dataclass(slots=True)
class LoadReport:
    """How a load ended: the first `loaded` blocks have their bytes, all others are undefined."""

    name: str
    blocks: tuple[int, ...]
    loaded: int
    loaded_bytes: int
    seconds: float  # from hand-over to end
    reason: MoveFailure = MoveFailure.NONE  # why not every block came
    waited_s: float = 0.0  # for blocks that another instance computed
    hidden_s: float = 0.0  # of the transfer, within that wait
    staged_bytes: int = 0  # of `loaded_bytes`, those that passed through staging memory

    @property
    def transfer_s(self) -> float:
        """Seconds of moving bytes: what is not waiting, and what the wait has hidden."""
        return self.seconds - self.waited_s + self.hidden_s


@dataclass(slots=True)
class SaveReport:
    """How a save ended: indices of the keys that the pool holds now, bytes that moved, why others were given up."""

    name: str
    stored: tuple[int, ...]
    present: int
    saved_bytes: int
    seconds: float
    lost: dict[MoveFailure, int] = field(default_factory=dict)
    staged_bytes: int = 0  # of `saved_bytes`, those that passed through staging memory
