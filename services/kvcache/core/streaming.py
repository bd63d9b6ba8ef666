"""Stream or wait outside: whether a load that waits for another instance takes the engine's memory while it waits.

Idea: a streamed load takes its blocks of the engine at once and fills them as they come, so that the transfer is hidden
behind the wait. What that gains is the shorter of the two. It costs memory that others could use meanwhile: nothing
while a good part of the memory is free, and as much as the whole wait when the load would take the last of it. Both
are measured: the speed of this engine's own loads, and its free memory at that moment. While the speed is not known
the load waits outside, as it does when nothing is gained.

Invariant: the answer depends on the arguments alone, apart from the speed that was learned.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from mooncache.kvcache.core.break_even import LoadSpeed

GAIN_MIN_S: Final = 0.001
FREE_SHARE: Final = 0.25
"""Part of the engine's memory that has to stay free for a stream to cost nothing."""
OPEN_MAX: Final = 128
"""Streamed loads of an engine at a time."""
LIMIT_OF_EXPECTED: Final = 3.0
"""A plan lets a leg wait so many times as long as it expects (docs/scheduling.md); for plans that do not say more."""


class StreamMode(StrEnum):
    """The setting `connector.stream`."""

    AUTO = "auto"
    ON = "on"
    OFF = "off"


class WaitPlace(StrEnum):
    """Where a load waits for blocks of another instance, and why. They are labels of metrics."""

    STREAMED = "streamed"
    OFF = "off"
    """It is switched off, or the engine cannot go on without blocks that do not come."""
    SPEED_UNKNOWN = "speed_unknown"
    NO_GAIN = "no_gain"
    MEMORY = "memory"
    NO_POOL = "no_pool"
    """The pool does not answer now."""
    MANY = "many"
    """As many loads are streamed as may be."""


@dataclass(frozen=True, slots=True)
class EngineMemory:
    """Blocks of an engine."""

    free: int
    total: int


def wait_place(
    mode: StreamMode,
    *,
    transfer_s: float | None,
    wait_s: float,
    blocks: int,
    memory: EngineMemory | None,
    streams: int,
) -> WaitPlace:
    """Where a load of so many blocks waits.

    Args:
        transfer_s: what moving them is expected to take; None: not known.
        wait_s: for how long they are expected to be waited for.
        memory: of the engine now; None: not known.
        streams: loads that are streamed now.
    """
    if mode is StreamMode.OFF:
        return WaitPlace.OFF
    if streams >= OPEN_MAX:
        return WaitPlace.MANY
    if mode is not StreamMode.AUTO:
        return WaitPlace.STREAMED
    if transfer_s is None:
        return WaitPlace.SPEED_UNKNOWN
    gain_s = min(transfer_s, wait_s)
    if gain_s < GAIN_MIN_S:
        return WaitPlace.NO_GAIN
    if memory is None or memory.free < blocks:
        return WaitPlace.MEMORY
    left = (memory.free - blocks) / max(1, memory.total)
    cost_s = wait_s * max(0.0, 1.0 - left / FREE_SHARE)
    return WaitPlace.STREAMED if gain_s > cost_s else WaitPlace.MEMORY


class Streaming:
    """The decision for one engine, with what it has learned of its loads.

    Args:
        block_bytes: bytes of a block, of all shards together.
    """

    def __init__(self, mode: StreamMode, *, block_bytes: int) -> None:
        self.mode = mode
        self._block_bytes = block_bytes
        self._speed = LoadSpeed()

    def loaded(self, blocks: int, seconds: float) -> None:
        """A load of so many blocks took so long, waiting left out."""
        if blocks > 0 and seconds > 0:
            self._speed.observe(blocks * self._block_bytes, seconds)

    def place(
        self,
        blocks: int,
        *,
        limit_s: float,
        memory: EngineMemory | None,
        streams: int,
        expected_s: float = 0.0,
    ) -> WaitPlace:
        """Where a load waits that may wait for `limit_s` and is expected to for `expected_s`, 0: not said.

        See `wait_place`.
        """
        return wait_place(
            self.mode,
            transfer_s=self._speed.seconds(blocks * self._block_bytes),
            wait_s=expected_s or limit_s / LIMIT_OF_EXPECTED,
            blocks=blocks,
            memory=memory,
            streams=streams,
        )
