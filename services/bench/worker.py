"""A benchmark's other processes: children that answer one JSON line per JSON line.

A measured system runs in processes of its own, and every repeat goes round all systems in turn, so that a
noisy moment of the machine falls on all of them alike.
"""

from __future__ import annotations

import json
import os
import select
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any


class WorkerError(RuntimeError):
    """A child did not start, died, or answered with an error; the message carries the end of its stderr."""


class Worker:
    """Starts `python -m <module> <args…>` and asks it questions."""

    def __init__(
        self,
        module: str,
        args: list[str],
        *,
        env: Mapping[str, str] | None = None,
        python: str = sys.executable,
        start_timeout_s: float = 60.0,
    ) -> None:
        self.module = module
        self._process = subprocess.Popen(
            [python, "-m", module, *args],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env={**os.environ, **(env or {})},
        )
        self.hello = self._answer(start_timeout_s)

    @property
    def pid(self) -> int:
        return self._process.pid

    def ask(self, op: str, *, timeout_s: float = 120.0, **arguments: Any) -> dict[str, Any]:
        """Send one request and return its answer. Raises WorkerError on an error or after timeout_s."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps({"op": op, **arguments}).encode() + b"\n")
            self._process.stdin.flush()
        except BrokenPipeError as error:
            raise WorkerError(self._obituary("is gone")) from error
        return self._answer(timeout_s)

    def _answer(self, timeout_s: float) -> dict[str, Any]:
        stdout = self._process.stdout
        assert stdout is not None
        deadline_s = time.monotonic() + timeout_s
        while True:
            ready, _, _ = select.select([stdout], [], [], max(0.0, deadline_s - time.monotonic()))
            if not ready:
                raise WorkerError(self._obituary(f"did not answer within {timeout_s:.0f} s"))
            line = stdout.readline()
            if not line:
                raise WorkerError(self._obituary("ended"))
            # libraries of the measured system may print to stdout too: answers are the lines that are JSON objects
            if line.startswith(b'{"ok"'):
                answer: dict[str, Any] = json.loads(line)
                if not answer["ok"]:
                    raise WorkerError(f"{self.module}: {answer['error']}")
                return answer

    def _obituary(self, what: str) -> str:
        self._process.kill()
        assert self._process.stderr is not None
        tail = self._process.stderr.read()[-2000:].decode(errors="replace")
        return f"{self.module} {what}. The end of its stderr: {tail.strip() or '(empty)'}"

    def close(self) -> None:
        """End the child: first by closing its input, after two seconds by a kill."""
        if self._process.stdin is not None:
            self._process.stdin.close()
        try:
            self._process.wait(2.0)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        for stream in (self._process.stdout, self._process.stderr):
            if stream is not None:
                stream.close()

    def __enter__(self) -> Worker:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def serve(hello: dict[str, Any], handlers: Mapping[str, Callable[..., dict[str, Any]]]) -> None:
    """The child's side: says hello, then answers until its input ends."""
    _say({"ok": True, **hello})
    for line in sys.stdin:
        question = json.loads(line)
        handler = handlers[question.pop("op")]
        try:
            answer = {"ok": True, **handler(**question)}
        except Exception as error:  # noqa: BLE001 - the parent raises it
            answer = {"ok": False, "error": f"{type(error).__name__}: {error}"}
        _say(answer)


def _say(answer: dict[str, object]) -> None:
    sys.stdout.write(json.dumps(answer) + "\n")
    sys.stdout.flush()


def processor_s(pid: int) -> float:
    """Processor time that a process has used, user and system."""
    fields = Path(f"/proc/{pid}/stat").read_text(encoding="ascii").rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def resident_bytes(pid: int) -> int:
    """Resident memory of a process, shared pages included. Raises WorkerError."""
    for line in Path(f"/proc/{pid}/status").read_text(encoding="ascii").splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) * 1024
    raise WorkerError(f"process {pid} has no VmRSS")


def find_tool(name: str) -> str | None:
    """A program that a Python package may have brought: beside this Python, else on the path."""
    return shutil.which(name, path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}")
