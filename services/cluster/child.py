"""Runs one service module as a child that cannot outlive its parent.

`python -m mooncache.cluster.child MODULE PID [spare] [FD]`: PID is the parent's. The kernel sends SIGTERM when it dies,
however it dies; the service then drains and ends by itself. FD is a listening socket of the parent; the service finds
it as it would one of systemd's (`runtime.ports.passed_listener`). With `spare` it imports the service's modules and
waits for a byte on standard input before it begins (`cluster.spare`).
"""

from __future__ import annotations

import ctypes
import importlib
import os
import runpy
import signal
import sys

from mooncache.cluster.processes import ServiceKind
from mooncache.cluster.spare import SPARE_WORD
from mooncache.runtime.ports import LISTENER_FD

_PR_SET_PDEATHSIG = 1
_ALLOWED = {service.module for service in ServiceKind}


def main() -> None:
    module, parent_pid = sys.argv[1], int(sys.argv[2])
    if module not in _ALLOWED:
        sys.exit(f"{module} is not a service of the embedded cluster")
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
    if os.getppid() != parent_pid:
        sys.exit("the parent ended before this child began")
    words = sys.argv[3:]
    if words[:1] == [SPARE_WORD]:
        words.pop(0)
        _wait(module)
    if words:
        _pass_on(int(words[0]))
    sys.argv = [module]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


def _wait(module: str) -> None:
    """Import what the service needs, and wait until it is needed. The parent closes the pipe when it is not."""
    importlib.import_module(f"{module}.__main__").import_all()
    if not os.read(0, 1):
        sys.exit(0)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)


def _pass_on(listener: int) -> None:
    """Put the socket where systemd would put it."""
    if listener != LISTENER_FD:
        os.dup2(listener, LISTENER_FD)
        os.close(listener)
    os.environ |= {"LISTEN_PID": str(os.getpid()), "LISTEN_FDS": "1"}


if __name__ == "__main__":
    main()
