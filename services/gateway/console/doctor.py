"""Runs `mooncache doctor` for the console, in a process of its own, and keeps what the last run said.

The command looks at files and disks, opens connections and compares bytes: work that must not share a loop or an
interpreter with requests. One run at a time; who asks while it runs sees that run. It has the settings of this gateway
and its token, and is killed when it takes too long or the gateway ends.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from typing import Any, Final

import msgspec

from mooncache.config import Config, to_toml
from mooncache.config.loading import ENV_CONFIG, ENV_PREFIX
from mooncache.gateway.core.doctor_report import DoctorReport, DoctorSteps, read_report
from mooncache.runtime.clock import Clock

RUN_S: Final = 60.0
"""The command takes 10 s at most; the rest is for its start on a busy host."""
_COMMAND: Final = (sys.executable, "-m", "mooncache.cli", "doctor", "--json", "--steps")
_OUTPUT_BYTES_MAX: Final = 16 << 20
_LINE_BYTES_MAX: Final = 64 << 10
_SAID_CHARS_MAX: Final = 500
_NICENESS: Final = 10  # requests of this host go first


class DoctorRuns:
    """The runs of one gateway's console. `close` it."""

    def __init__(self, clock: Clock, command: tuple[str, ...] = _COMMAND) -> None:
        """command: what is run; other ones are for tests."""
        self._clock, self._command = clock, command
        self._steps, self._error = DoctorSteps(), ""
        self._report: DoctorReport | None = None
        self._began_s: float | None = None
        self._ended_s: float | None = None
        self._run: asyncio.Task[None] | None = None

    @property
    def running(self) -> bool:
        """Whether a run is under way."""
        return self._run is not None and not self._run.done()

    def start(self, config: Config) -> bool:
        """Begin a run with these settings; False when one is under way already."""
        if self.running:
            return False
        self._steps, self._error = DoctorSteps(), ""
        self._began_s = self._clock.wall_s()
        self._run = asyncio.create_task(self._keep(config), name="doctor")
        return True

    def document(self) -> dict[str, Any]:
        """What a page shows. The results are those of the last run that ended well; `error` is of the last one."""
        report = self._report
        return {
            "running": self.running,
            "steps": self._steps.rows(),
            "began_s": self._began_s,
            "ended_s": self._ended_s,
            "error": self._error,
            "counts": report.counts if report is not None else None,
            "left_out": report.left_out if report is not None else 0,
            "elapsed_s": report.elapsed_s if report is not None else None,
            "checks": [msgspec.structs.asdict(row) for row in report.rows] if report is not None else [],
        }

    async def close(self) -> None:
        """End the run that is under way."""
        if self._run is not None:
            self._run.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._run

    async def _keep(self, config: Config) -> None:
        """One run. What goes wrong becomes a sentence of the page."""
        try:
            async with asyncio.timeout(RUN_S):
                data = await self._ask(config)
            self._report = await asyncio.to_thread(read_report, data)
            self._ended_s = self._clock.wall_s()
        except TimeoutError:
            self._error = f"The doctor did not end within {RUN_S:g} s."
        except (OSError, ValueError) as error:
            self._error = f"The doctor could not be run: {str(error)[:_SAID_CHARS_MAX]}."

    async def _ask(self, config: Config) -> bytes:
        """What the command wrote. Raises OSError, ValueError."""
        process = await self._start(config)
        try:
            assert process.stdout is not None
            assert process.stderr is not None
            data, said = await asyncio.gather(_whole(process.stdout), self._follow(process.stderr))
            await process.wait()
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            await asyncio.shield(process.wait())
        if not data:
            raise ValueError(said.rstrip(".") or f"it ended with {process.returncode} and said nothing")
        return data

    async def _start(self, config: Config) -> asyncio.subprocess.Process:
        settings = _settings_file(config)
        try:
            kept = {name: value for name, value in os.environ.items() if not name.startswith(ENV_PREFIX)}
            process = await asyncio.create_subprocess_exec(
                *self._command,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.PIPE,
                limit=_LINE_BYTES_MAX,
                env={**kept, ENV_CONFIG: f"/proc/self/fd/{settings}"},
                pass_fds=(settings,),
                start_new_session=True,  # uvloop knows no `process_group`
            )
        finally:
            os.close(settings)
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, process.pid, _NICENESS)
        return process

    async def _follow(self, pipe: asyncio.StreamReader) -> str:
        """Take the steps; the end of everything else that was said there."""
        said = ""
        async for line in pipe:
            if not self._steps.take(line):
                said = (said + line.decode("utf-8", "replace"))[-_SAID_CHARS_MAX:]
        return said.strip()


def _settings_file(config: Config) -> int:
    """A file in memory without a name; its descriptor, the caller's to close."""
    found = os.memfd_create("mooncache-doctor")
    with open(found, "wb", closefd=False) as file:
        file.write(to_toml(config).encode())
    return found


async def _whole(pipe: asyncio.StreamReader) -> bytes:
    data = bytearray()
    while piece := await pipe.read(_LINE_BYTES_MAX):
        data += piece
        if len(data) > _OUTPUT_BYTES_MAX:
            raise ValueError("its report is too long")
    return bytes(data)
