"""What tests do to processes that they started."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

_STOPS_WITHIN_S = 60.0


def freeze(pid: int) -> None:
    """SIGSTOP, and return when no thread of the process runs any more; on a busy machine that takes a while."""
    os.kill(pid, signal.SIGSTOP)
    tasks = Path(f"/proc/{pid}/task")
    until_s = time.monotonic() + _STOPS_WITHIN_S
    while any(_state(task) not in "TtZX" for task in tasks.glob("*")):
        assert time.monotonic() < until_s, f"process {pid} did not stop"
        time.sleep(0.005)


def _state(task: Path) -> str:
    try:
        return (task / "stat").read_text().rpartition(") ")[2][0]
    except FileNotFoundError:  # it ended meanwhile
        return "X"
