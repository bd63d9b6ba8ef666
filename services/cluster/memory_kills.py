"""Whether the kernel has killed a process for lack of memory a moment ago, by its own count.

A process that was killed says nothing, and its exit status names the signal alone. The kernel counts its kills, also
those for a cgroup's limit, but not whom it killed: so what is said of one process is "perhaps".
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

LATELY_S: Final = 30.0
"""A process with much memory is gone seconds after it was killed."""
_COUNTS: Final = Path("/proc/vmstat")


def killed_so_far(counts: Path = _COUNTS) -> int:
    """How many processes the kernel has killed since it started; 0 where it does not say."""
    try:
        lines = counts.read_text(encoding="ascii", errors="replace").splitlines()
    except OSError:
        return 0
    found = next((line.partition(" ")[2] for line in lines if line.startswith("oom_kill ")), "")
    return int(found) if found.isascii() and found.isdigit() else 0


class MemoryKills:
    """Remembers when the count grew last. Look at least every `LATELY_S`."""

    def __init__(self, count: int) -> None:
        self._count = count
        self._grew_s = float("-inf")

    def look(self, count: int, now_s: float) -> None:
        """The count as it is now."""
        if count != self._count:
            self._count, self._grew_s = count, now_s

    def lately(self, now_s: float) -> bool:
        """Whether it grew a moment ago."""
        return now_s - self._grew_s <= LATELY_S
