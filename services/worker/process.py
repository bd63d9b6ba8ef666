"""One run of an engine as a process: start behind the guard, look whether it lives, end it, read what it
wrote last.

Nothing here decides: see core/supervision.py. The guard (guard.py) makes sure that no process of the engine
is left.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from mooncache.errors import EngineUnavailable
from mooncache.runtime.log_files import rotate
from mooncache.runtime.logs import redact_text

_GUARD = Path(__file__).with_name("guard.py")
_TAIL_BYTES = 16_384
_LINE_CHARS_MAX = 400
_GUARD_S = 12.0


class EngineProcess:
    """A running engine. `pid` is the engine's own, `exited` its exit status once it has ended.

    Raises:
        EngineUnavailable: the process could not be started.
    """

    def __init__(self, command: Sequence[str], env: Mapping[str, str], log_path: Path) -> None:
        self.log_path = log_path
        read_end, self._lifeline = os.pipe2(os.O_CLOEXEC)
        try:
            log_path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            rotate(log_path)
            descriptor = os.open(log_path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
            with os.fdopen(descriptor, "ab") as log:
                self._process = subprocess.Popen(
                    [sys.executable, "-I", "-S", str(_GUARD), str(read_end), *command],
                    env=dict(env),
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    pass_fds=(read_end,),
                    process_group=0,
                )
        except OSError as error:
            os.close(self._lifeline)
            raise EngineUnavailable(
                f"The engine cannot be started: {error.strerror} ({error.filename})."
            ) from None
        finally:
            os.close(read_end)

    @property
    def pid(self) -> int:
        """The engine's process id; the guard's own while the engine is not there yet."""
        found = children(self._process.pid)
        return found[0] if found else self._process.pid

    @property
    def exited(self) -> int | None:
        """None while it runs."""
        code = self._process.poll()
        if code is not None:
            self._cut()
        return code

    def terminate(self) -> None:
        """Ask the engine to end."""
        if self._process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                self._process.send_signal(signal.SIGTERM)

    async def kill(self) -> None:
        """End every process of the engine now, and wait until they are gone."""
        self._cut()
        if await self.wait(_GUARD_S) is None:  # the guard itself hangs or was stopped
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            await self.wait(_GUARD_S)

    async def wait(self, timeout_s: float) -> int | None:
        """Wait for the end; None when it still runs."""
        step_s, left_s = 0.02, timeout_s
        while self.exited is None and left_s > 0:
            await asyncio.sleep(min(step_s, left_s))
            left_s -= step_s
        return self.exited

    async def stop(self, grace_s: float) -> None:
        """Ask, wait, and kill what is left."""
        self.terminate()
        await self.wait(grace_s)
        await self.kill()

    def log_tail(self, lines: int = 20) -> list[str]:
        """The last lines that the engine wrote, without tokens."""
        return tail(self.log_path, lines)

    def _cut(self) -> None:
        if self._lifeline >= 0:
            os.close(self._lifeline)
            self._lifeline = -1


def tail(path: Path, lines: int) -> list[str]:
    """The last lines of a file, shortened, without tokens; empty when there is no such file."""
    try:
        with path.open("rb") as log:
            log.seek(max(0, log.seek(0, os.SEEK_END) - _TAIL_BYTES))
            text = log.read().decode("utf-8", "replace")
    except OSError:
        return []
    kept = [line for line in text.splitlines() if line.strip()][-lines:]
    return [redact_text(line)[:_LINE_CHARS_MAX] for line in kept]


def children(pid: int) -> list[int]:
    """Children of a process, oldest first."""
    try:
        text = Path(f"/proc/{pid}/task/{pid}/children").read_text(encoding="ascii")
        return [int(word) for word in text.split()]
    except (OSError, ValueError):
        return []
