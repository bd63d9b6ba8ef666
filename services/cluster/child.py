"""Runs one service module as a child that cannot outlive its parent: `python -m mooncache.cluster.child MODULE`.

The kernel sends SIGTERM when the parent dies, however it dies; the service then drains and ends by itself.
"""

from __future__ import annotations

import ctypes
import os
import runpy
import signal
import sys

from mooncache.cluster.processes import ServiceKind

_PR_SET_PDEATHSIG = 1
_ALLOWED = {service.module for service in ServiceKind}


def main() -> None:
    module, parent_pid = sys.argv[1], int(sys.argv[2])
    if module not in _ALLOWED:
        sys.exit(f"{module} is not a service of the embedded cluster")
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
    if os.getppid() != parent_pid:
        sys.exit("the parent ended before this child began")
    sys.argv = [module]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
