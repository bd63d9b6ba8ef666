"""Runs one engine so that nothing of it outlives the worker: `python -I -S guard.py LIFELINE_FD COMMAND...`.

The guard stands between worker and engine. It is the subreaper of everything that the engine starts, so
grandchildren that lose their parent become its children instead of init's. It holds the reading end of a pipe
whose only writing end is in the worker: however the worker dies, the pipe ends, and the guard kills every
descendant. The same happens when the engine itself ends, or when the guard gets SIGTERM twice. The first
SIGTERM goes on to the engine alone: a graceful end.

Exit status: the engine's own (128 + signal when a signal ended it); 137 after the lifeline broke. Standard
library only: the guard lives as long as the engine and should cost nothing.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import signal
import sys
import time

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_KILL_S = 10.0
_TRACKER_S = 8.0
_STATUS_LOST = 137


def descendants(root: int) -> list[int]:
    """Process ids below `root`, from one look at /proc."""
    parents: dict[int, int] = {}
    for name in os.listdir("/proc"):
        if name.isdigit():
            try:
                with open(f"/proc/{name}/stat", "rb") as file:
                    parents[int(name)] = int(file.read().rpartition(b")")[2].split()[1])
            except (OSError, ValueError, IndexError):
                continue
    found: list[int] = []
    level = [root]
    while level:
        level = [pid for pid, parent in parents.items() if parent in level]
        found += level
    return found


def may_be_tracker(pid: int) -> bool:
    """Whether the process is Python's tracker of shared memory: it removes what killed processes left, then ends.

    A process that is just starting its program has no command line for a moment. It may become the tracker.
    """
    try:
        with open(f"/proc/{pid}/cmdline", "rb") as file:
            text = file.read(4096)
    except OSError:
        return False
    return not text or b"multiprocessing.resource_tracker" in text


def kill_all() -> None:
    """Kill every descendant until none is left; children are reaped on the way."""
    begun_s = time.monotonic()
    while (passed_s := time.monotonic() - begun_s) < _KILL_S:
        left = descendants(os.getpid())
        for pid in left:
            if passed_s < _TRACKER_S and may_be_tracker(pid):
                continue
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        reap()
        if not left:
            return
        time.sleep(0.01)


def reap() -> dict[int, int]:
    """Collect the children that have ended: pid -> exit status as a shell gives it."""
    ended: dict[int, int] = {}
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return ended
        if pid == 0:
            return ended
        code = os.waitstatus_to_exitcode(status)
        ended[pid] = code if code >= 0 else 128 - code


def start(command: list[str], lifeline: int, prctl: object) -> int:
    """Fork the engine. It dies with the guard, whatever happens to that one."""
    guard = os.getpid()
    pid = os.fork()
    if pid:
        return pid
    try:
        os.close(lifeline)
        prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)  # type: ignore[operator]
        signal.set_wakeup_fd(-1)
        for number in (signal.SIGTERM, signal.SIGCHLD, signal.SIGPIPE):
            signal.signal(number, signal.SIG_DFL)
        if os.getppid() == guard:
            os.execvp(command[0], command)  # noqa: S606 - a shell would be one more process to watch
    except OSError as error:
        os.write(2, f"{command[0]} cannot be started: {error.strerror}\n".encode())
    os._exit(127)


def main() -> int:
    lifeline, command = int(sys.argv[1]), sys.argv[2:]
    prctl = ctypes.CDLL(None, use_errno=True).prctl
    prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    wake_read, wake_write = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
    signal.set_wakeup_fd(wake_write, warn_on_full_buffer=False)
    for number in (signal.SIGTERM, signal.SIGCHLD):
        signal.signal(number, lambda *_: None)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    engine = start(command, lifeline, prctl)
    terms = 0
    while True:
        readable, _, _ = select.select([lifeline, wake_read], [], [])
        if wake_read in readable:
            seen = os.read(wake_read, 4096)
            ended = reap()
            if engine in ended:
                kill_all()
                return ended[engine]
            if signal.SIGTERM in seen:
                terms += 1
                if terms == 1:
                    os.kill(engine, signal.SIGTERM)
                else:
                    kill_all()
                    return _STATUS_LOST
        if lifeline in readable:
            kill_all()
            return _STATUS_LOST


if __name__ == "__main__":
    sys.exit(main())
