"""What tests do to processes that they started."""

from __future__ import annotations

import ctypes
import os
import signal
from pathlib import Path

from tests.conditions import wait_until

_PR_SET_PDEATHSIG = 1
_prctl = ctypes.CDLL(None).prctl


def end_with_parent() -> None:
    """For `preexec_fn`: the process gets SIGTERM when the tests end before it, however they end."""
    _prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)


def freeze(pid: int) -> None:
    """SIGSTOP, and return when no thread of the process runs any more; on a busy machine that takes a while."""
    os.kill(pid, signal.SIGSTOP)
    tasks = Path(f"/proc/{pid}/task")

    def stopped() -> bool:
        return all(_state(task) in "TtZX" for task in tasks.glob("*"))

    wait_until(stopped, f"process {pid} stopped", every_s=0.005)


def _state(task: Path) -> str:
    try:
        return (task / "stat").read_text().rpartition(") ")[2][0]
    except FileNotFoundError:  # it ended meanwhile
        return "X"
