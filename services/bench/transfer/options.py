"""The options of `mooncache bench transfer`."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

KIB = 1 << 10
MIB = 1 << 20
SIZES_HINT = "1048576, 1M, 64K"


class Transport(StrEnum):
    """What moves the bytes."""

    LOOPBACK = "loopback"
    SHM = "shm"
    TCP = "tcp"
    RDMA = "rdma"
    NIXL = "nixl"


class Direction(StrEnum):
    """Whether blocks come from the node or go there."""

    READ = "read"
    WRITE = "write"


@dataclass(frozen=True, slots=True)
class TransferOptions:
    """Sizes in bytes. Every combination of the tuples is one measurement, repeated in `rounds` rounds over all."""

    transports: tuple[Transport, ...] = ()  # empty: all that this machine and the peer have
    directions: tuple[Direction, ...] = tuple(Direction)
    block_bytes: tuple[int, ...] = (16 * KIB, 256 * KIB, MIB)
    batches: tuple[int, ...] = (8,)
    threads: tuple[int, ...] = (1,)
    rounds: int = 3
    duration_ms: int = 400
    references: bool = True
    arena_bytes: int = 1 << 30

    def quick(self) -> TransferOptions:
        """One short round; its figures say that it works, not how fast."""
        return TransferOptions(
            self.transports,
            self.directions,
            self.block_bytes[-1:],
            self.batches[:1],
            self.threads[:1],
            rounds=1,
            duration_ms=100,
            references=self.references,
            arena_bytes=256 * MIB,
        )


def parse_size(text: str) -> int:
    """Bytes of "4096", "64K", "1M" or "1G" (powers of 1,024). Raises ValueError with a sentence."""
    factors = {"K": KIB, "M": MIB, "G": 1 << 30}
    digits, factor = text.strip().upper().removesuffix("IB").removesuffix("B"), 1
    if digits and digits[-1] in factors:
        digits, factor = digits[:-1], factors[digits[-1]]
    if not digits.isdigit() or not int(digits):
        raise ValueError(f"{text!r} is not a size; write for example {SIZES_HINT}.")
    return int(digits) * factor
