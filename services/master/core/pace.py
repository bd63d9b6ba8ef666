"""How fast the repair goes, and how long it waits: a budget of bytes, a rate of lately, and patience with lost nodes.

All three are pure: the time is passed in, in seconds of one monotonic clock.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Final

BURST_S: Final = 0.5  # of the rate may be saved up
WINDOW_S: Final = 10.0  # what "lately" is


@dataclass(slots=True)
class ByteBudget:
    """Fills at an even rate. What is taken may exceed what is there, and is then waited for: so the rate is kept over
    time whatever the size of a block is."""

    bytes_per_s: float
    left_bytes: float = 0.0
    filled_s: float | None = None

    def fill(self, now_s: float) -> None:
        """Time has passed."""
        passed_s = 0.0 if self.filled_s is None else max(0.0, now_s - self.filled_s)
        self.filled_s = now_s
        self.left_bytes += passed_s * self.bytes_per_s
        self._cap()

    def take(self, size_bytes: int) -> None:
        """Take bytes when `ready`."""
        self.left_bytes -= size_bytes

    def give_back(self, size_bytes: int) -> None:
        """Bytes that were taken and did not move."""
        self.left_bytes += size_bytes
        self._cap()

    @property
    def ready(self) -> bool:
        """Whether something may be taken."""
        return self.left_bytes > 0.0

    def _cap(self) -> None:
        self.left_bytes = min(self.left_bytes, self.bytes_per_s * BURST_S)


@dataclass(slots=True)
class LateRate:
    """Bytes in a second, over the last `WINDOW_S`."""

    samples: deque[tuple[float, int]] = field(default_factory=deque)

    def note(self, total_bytes: int, now_s: float) -> None:
        """So many bytes have moved in all."""
        if self.samples and now_s - self.samples[-1][0] < WINDOW_S / 100:
            return
        self.samples.append((now_s, total_bytes))
        while len(self.samples) > 2 and now_s - self.samples[0][0] > WINDOW_S:
            self.samples.popleft()

    def bytes_per_s(self, total_bytes: int, now_s: float) -> float:
        """The rate as of now."""
        began_s, began_bytes = self.samples[0] if self.samples else (now_s, total_bytes)
        return (total_bytes - began_bytes) / (now_s - began_s) if now_s > began_s else 0.0


@dataclass(slots=True)
class Patience:
    """Waits after a loss whether the node comes back: with its memory, where that is kept.

    A node that goes again and again does not make it wait longer: each wait has its end from the beginning.
    """

    grace_s: float
    ends_s: dict[int, float] = field(default_factory=dict)

    def lost(self, node: int, now_s: float) -> None:
        """What the node held is no longer known."""
        self.ends_s.setdefault(node, now_s + self.grace_s)

    def back(self, node: int) -> None:
        """What the node holds is known again."""
        self.ends_s.pop(node, None)

    def left_s(self, now_s: float) -> float:
        """How long to wait still; 0.0 when nothing is waited for."""
        for node in [node for node, end_s in self.ends_s.items() if end_s <= now_s]:
            del self.ends_s[node]
        return max((end_s - now_s for end_s in self.ends_s.values()), default=0.0)
