"""Child processes of the embedded cluster: start with its own environment and log file, watch, stop, never orphan."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path

from mooncache.cluster.interpreter import interpreter_of
from mooncache.cluster.spare import SPARE_WORD, SpareProcess
from mooncache.runtime.logs import Event

_TAIL_BYTES = 16_384
_LOG_LINE = re.compile(r" INFO [0-9: -]+ \[[^\]]+\] ([A-Za-z].*)$")
RUN_VARIABLE = "_MOONCACHE_RUN"
"""Name of the variable that marks every process of one `mooncache up`."""


class ServiceKind(StrEnum):
    """The service that a process runs, named as its package and its section of the configuration."""

    MASTER = "master"
    STORE_NODE = "store_node"
    CONDUCTOR = "conductor"
    GATEWAY = "gateway"
    WORKER = "worker"

    @property
    def module(self) -> str:
        """The module to run."""
        return f"mooncache.{self}"


@dataclass
class Part:
    """One process of the cluster: `name` for people, `service` to run, `env` on top of the parent's environment.

    `control` and `metrics` are host:port of its control service and of its probe server ("" when it has none).
    `listener` is the listening socket that it gets from its parent: clients wait there while it is started again.
    """

    name: str
    service: ServiceKind
    env: Mapping[str, str]
    log_path: Path
    control: str = ""
    metrics: str = ""
    listener: socket.socket | None = None
    keeps_spare: bool = False
    """Whether its next process is started ahead of need, with its modules imported (decision 0078)."""
    process: subprocess.Popen[bytes] | None = field(default=None, repr=False)
    spare: SpareProcess | None = field(default=None, repr=False)

    @property
    def port(self) -> int:
        """The port of its control service."""
        return int(self.control.rpartition(":")[2])

    @property
    def pid(self) -> int:
        return self.process.pid if self.process is not None else 0

    @property
    def exit_code(self) -> int | None:
        """None while it runs (or was never started)."""
        return self.process.poll() if self.process is not None else None

    def start(self) -> None:
        """Start it in a process group of its own, so that Ctrl-C reaches only the parent.

        After a crash the spare process takes its place, if there is one.
        """
        python = interpreter_of(self.log_path.parent.parent)
        crashed = self.exit_code is not None and self.exit_code < 0
        spare = self.spare
        if spare is not None and crashed and spare.interpreter == python and spare.begin():
            self.process, self.spare = spare.process, None
            return
        self.end_spare()
        self.process = self._popen(python, subprocess.DEVNULL)

    def prepare_spare(self) -> None:
        """Have a spare process, unless there is one already."""
        if self.spare is None or not self.spare.waits():
            self.end_spare()
            python = interpreter_of(self.log_path.parent.parent)
            self.spare = SpareProcess(python, self._popen(python, subprocess.PIPE, SPARE_WORD))

    def end_spare(self) -> None:
        """Have no spare process."""
        if self.spare is not None:
            self.spare.end()
            self.spare = None

    def _popen(self, python: str, stdin: int, *words: str) -> subprocess.Popen[bytes]:
        base = {key: value for key, value in os.environ.items() if not _is_service_setting(key)}
        self.log_path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        if python != sys.executable:  # what was set for this one's modules is not for another's
            base = {key: value for key, value in base.items() if key not in ("PYTHONPATH", "PYTHONHOME")}
        listener = () if self.listener is None else (self.listener.fileno(),)
        command = [python, "-m", "mooncache.cluster.child", self.service.module, str(os.getpid())]
        with self.log_path.open("ab") as log:
            return subprocess.Popen(
                [*command, *words, *map(str, listener)],
                env={**base, **self.env},
                pass_fds=listener,
                stdin=stdin,
                stdout=log,
                stderr=log,
                process_group=0,
            )

    def open_pidfd(self) -> int | None:
        """A descriptor that can be read when its process has ended, the caller's to close; None when none runs."""
        if self.process is None or self.process.poll() is not None:
            return None
        try:
            return os.pidfd_open(self.process.pid)
        except OSError:  # it has ended meanwhile, or no descriptors are left: who asks looks again later
            return None

    def send(self, number: signal.Signals) -> None:
        """Send a signal; nothing happens when it has ended."""
        if self.process is not None and self.process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                self.process.send_signal(number)

    def wait(self, timeout_s: float) -> int | None:
        """Wait for its end; None when it still runs."""
        if self.process is None:
            return None
        try:
            return self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return None

    def log_tail(self, lines: int = 15) -> str:
        """The last lines it wrote."""
        return "\n".join(readable(line) for line in self._last_lines()[-lines:])

    def refusal(self) -> str:
        """What it said last of its configuration, when it ended with the exit code for a wrong one; "" for nothing."""
        for line in reversed(self._last_lines()):
            try:
                found = json.loads(line)
            except (ValueError, RecursionError):
                # Before its log is set up a service says it in plain words.
                if line.strip():
                    return line.strip()
                continue
            if isinstance(found, dict) and found.get("event") == Event.SERVICE_FAILED and found.get("reason"):
                return str(found["reason"])
        return ""

    def _last_lines(self) -> list[str]:
        try:
            with self.log_path.open("rb") as log:
                log.seek(max(0, log.seek(0, os.SEEK_END) - _TAIL_BYTES))
                return log.read().decode("utf-8", "replace").splitlines()
        except OSError:
            return []


def stop_all(parts: list[Part], timeout_s: float) -> list[str]:
    """Ask every part to end, then kill what is left; returns the names of those that had to be killed."""
    for part in parts:
        part.send(signal.SIGTERM)
    deadline_s = time.monotonic() + timeout_s
    killed = []
    for part in parts:
        if part.process is None:
            continue
        if part.wait(max(0.0, deadline_s - time.monotonic())) is None:
            part.send(signal.SIGKILL)
            part.wait(5.0)
            killed.append(part.name)
    return killed


def readable(line: str) -> str:
    """A log line of a service for people: time, level, event, fields; any other line as it is."""
    try:
        found = json.loads(line)
        clock = str(found.pop("timestamp")).partition("T")[2][:8]
        words = [clock, str(found.pop("level")), str(found.pop("event"))]
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return line
    words += [
        f"{name}={value}" for name, value in found.items() if name not in {"logger", "service", "trace_id"}
    ]
    return " ".join(words)


def last_words(log: Path) -> str:
    """The newest message of an engine's log, without its prefix of process, level, time and place; "" without one."""
    try:
        with log.open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - _TAIL_BYTES))
            lines = file.read().decode("utf-8", "replace").splitlines()
    except OSError:
        return ""
    found = (match[1] for line in reversed(lines) if (match := _LOG_LINE.search(line)))
    return next(found, "")


def processes_of_run(run_id: str) -> list[int]:
    """Process ids of this run, the parts' own children included.

    All of them carry its id in their environment, but some programs write their title over it. So whatever descends
    from a process that carries it, or is in such a process' group, counts as well.
    """
    marker = f"{RUN_VARIABLE}={run_id}".encode()
    marked: set[int] = set()
    parents: dict[int, int] = {}
    groups: dict[int, int] = {}
    for folder in Path("/proc").iterdir():
        if not folder.name.isdigit() or int(folder.name) == os.getpid():
            continue
        pid = int(folder.name)
        with contextlib.suppress(OSError, ValueError, IndexError):
            fields = (folder / "stat").read_bytes().rpartition(b") ")[2].split()
            if fields[0] == b"Z":
                continue
            parents[pid], groups[pid] = int(fields[1]), int(fields[2])
            if marker in (folder / "environ").read_bytes().split(b"\0"):
                marked.add(pid)
    theirs = {groups[pid] for pid in marked}
    found = marked | {pid for pid, group in groups.items() if group in theirs}
    while more := {pid for pid, parent in parents.items() if parent in found} - found:
        found |= more
    return sorted(found)


def wait_for_end(run_id: str, timeout_s: float) -> bool:
    """Wait until no process of this run is left; False when some still are after that time."""
    deadline_s = time.monotonic() + timeout_s
    while processes_of_run(run_id):
        if time.monotonic() > deadline_s:
            return False
        time.sleep(0.02)
    return True


def end_leftovers(run_id: str, timeout_s: float = 5.0) -> list[int]:
    """Kill what is left of a run, for example an engine whose supervisor was killed; returns the process ids."""
    killed: set[int] = set()
    deadline_s = time.monotonic() + timeout_s
    while left := processes_of_run(run_id):
        for pid in left:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
                killed.add(pid)
        if time.monotonic() > deadline_s:
            break
        time.sleep(0.02)
    return sorted(killed)


def describe_exit(code: int) -> str:
    """An exit code in words."""
    if code >= 0:
        return f"exit code {code}"
    try:
        return f"signal {signal.Signals(-code).name}"
    except ValueError:
        return f"signal {-code}"


def _is_service_setting(name: str) -> bool:
    """Settings of the parent that would be wrong for every child: the embedded cluster sets them itself."""
    return name.startswith(
        (
            "MOONCACHE_STORE_NODE_",
            "MOONCACHE_MASTER_",
            "MOONCACHE_CLUSTER_",
            "MOONCACHE_WORKER_",
            "MOONCACHE_STATE_DIR",
        )
    )
