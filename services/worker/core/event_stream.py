"""Order in a stream of numbered batches: what comes next, what is missing, what came twice.

Publishers number batches from 0. A gap is asked for again (replay); what the publisher no longer has
is lost. Live numbers only grow, so a live number that falls means another publisher: everything known about
the old one is void.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

SEQUENCE_BYTES: Final = 8
END_OF_REPLAY: Final = (1 << 64) - 1


class EventAction(StrEnum):
    """What to do with a batch of an engine's events."""

    APPLY = "apply"
    REPLAY = "replay"
    OLD = "old"
    RESTARTED = "restarted"


def sequence_of(frame: bytes) -> int | None:
    """Number in a frame of 8 bytes, big endian; None for other frames."""
    return int.from_bytes(frame, "big") if len(frame) == SEQUENCE_BYTES else None


@dataclass(slots=True)
class EventStream:
    """The order of a stream of numbered batches. `expected` is the number of the next batch to apply."""

    expected: int = 0
    last_live: int = -1
    seen: int = 0
    lost: int = 0
    replayed: int = 0

    def offer(self, sequence: int) -> EventAction:
        """A live batch came: apply it, ask for a replay first, pass it over, or begin anew and offer it again."""
        if sequence <= self.last_live:
            return EventAction.RESTARTED
        self.last_live = sequence
        if sequence < self.expected:
            return EventAction.OLD
        if sequence > self.expected:
            return EventAction.REPLAY
        self._applied()
        return EventAction.APPLY

    def replay(self, sequences: Iterable[int]) -> list[int]:
        """Numbers of a replay's answer that have to be applied, in order; what is missing between them is lost."""
        wanted = sorted({number for number in sequences if number >= self.expected})
        for number in wanted:
            self.lost += number - self.expected
            self.expected = number
            self._applied()
            self.replayed += 1
        return wanted

    def after_replay(self, sequence: int) -> bool:
        """Whether the live batch that showed the gap is still to be applied; what lacks is lost."""
        if sequence < self.expected:
            return False
        self.lost += sequence - self.expected
        self.expected = sequence
        self._applied()
        return True

    def restart(self) -> None:
        """Another publisher: numbers begin at 0 again, counters go on."""
        self.expected, self.last_live = 0, -1

    def _applied(self) -> None:
        self.expected += 1
        self.seen += 1
