"""Runs one service module as a child that cannot outlive its parent.

`python -m mooncache.cluster.child MODULE PID [FD]`: PID is the parent's. The kernel sends SIGTERM when it dies, however
it dies; the service then drains and ends by itself. FD is a listening socket of the parent; the service finds it as it
would one of systemd's (`runtime.ports.passed_listener`).
"""

from __future__ import annotations

import ctypes
import os
import runpy
import signal
import sys

from mooncache.cluster.processes import ServiceKind
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
    if len(sys.argv) > 3:
        _pass_on(int(sys.argv[3]))
    sys.argv = [module]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


def _pass_on(listener: int) -> None:
    """Put the socket where systemd would put it."""
    if listener != LISTENER_FD:
        os.dup2(listener, LISTENER_FD)
        os.close(listener)
    os.environ |= {"LISTEN_PID": str(os.getpid()), "LISTEN_FDS": "1"}


if __name__ == "__main__":
    main()
