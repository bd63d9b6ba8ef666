"""When the next piece of paced copies may come into this node, so that copies are spread over time.

Idea: a rate that is kept on average alone leaves bursts, and whoever reads beside a burst waits for it. All calls share
one pace, because their bytes share the node's processors and links. Time is an argument, in seconds of one monotonic
clock.
"""

from __future__ import annotations

from dataclasses import dataclass

PIECE_BYTES = 1 << 20
"""Of a paced copy at once, or one larger block."""


@dataclass(slots=True)
class CopyPace:
    """The turns of pieces, one after the other."""

    free_s: float = 0.0
    """When the next turn begins at the earliest."""

    def take_turn(self, size_bytes: int, bytes_per_s: int, now_s: float, wait_max_s: float) -> float | None:
        """Seconds until a piece may move; None, and no turn is taken, when that is longer than `wait_max_s`.

        bytes_per_s: 0: it may move now, and later pieces do not wait for it.
        """
        if not bytes_per_s:
            return 0.0
        begin_s = max(now_s, self.free_s)
        if begin_s - now_s > wait_max_s:
            return None
        self.free_s = begin_s + size_bytes / bytes_per_s
        return begin_s - now_s
