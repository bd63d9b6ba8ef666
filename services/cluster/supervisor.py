"""Keeping the processes of one machine running: each by itself, so that the end of one ends nothing else.

A part that ends is started again at the same address: at once the first time, since its clients wait, and after a pause
that grows while it keeps ending. One that has stopped answering is killed first. A part that keeps ending is given up,
and everything else goes on. The rules are those of `mooncache.runtime.supervision`, by which a worker treats its
engine.
"""

from __future__ import annotations

import asyncio
import os
import random
import signal
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final, NamedTuple

from mooncache.cluster.memory_kills import MemoryKills, killed_so_far
from mooncache.cluster.processes import Part, describe_exit
from mooncache.runtime.clock import Clock, SystemClock
from mooncache.runtime.log_files import trim
from mooncache.runtime.supervision import RestartPolicy, RunState, Supervision
from mooncache.runtime.tasks import cancel_all, wait_for_event

POLL_S: Final = 0.1
_REAP_S: Final = 0.005
PROBE_S: Final = 0.5
SILENCE_S: Final = 3.0
"""Silence that `status` mentions; a busy process may be late by less."""
SPARE_AFTER_S: Final = 5.0
"""How long a part is ready before its spare process is prepared, which takes a second of a processor."""
SPARE_AGAIN_S: Final = 60.0
"""How often a spare process that has ended by itself is replaced."""
SERVICE_POLICY: Final = RestartPolicy(
    start_timeout_s=120.0, backoff_first_s=0.5, backoff_max_s=30.0, first_at_once=True
)
"""Services start in seconds, so the first pauses are shorter than an engine's."""


class PartStage(StrEnum):
    """How far a part is."""

    STARTED = "started"  # its process runs; it has not said anything yet
    BUSY = "busy"  # the text says what it is doing, or what happened to it
    READY = "ready"


class PartNews(NamedTuple):
    """What happened to a part, in a few words; `detail` is the newest line of its engine's log, or ""."""

    stage: PartStage
    text: str
    detail: str = ""


STARTED: Final = PartNews(PartStage.STARTED, "started")
READY: Final = PartNews(PartStage.READY, "ready")
StartProgress = Callable[[str, PartNews], None]
"""Called with the name of a part and its news."""
Probe = Callable[[Part], Awaitable[bool]]
"""Whether a part answers."""


@dataclass(slots=True)
class PartRecord:
    """What has become of one part since everything was ready. `reason` is empty when all is well."""

    state: RunState = RunState.READY
    restarts: int = 0
    reason: str = ""
    last_end: str = ""


class ProcessEnd:
    """The kernel's word that a process of a part has ended.

    It is asked for once for each process, because one that is being taken down gives no new descriptor. That takes the
    longer the more memory it has.
    """

    def __init__(self) -> None:
        self._pid, self._descriptor = 0, -1
        self._seen = asyncio.Event()

    async def wait(self, part: Part, at_most_s: float) -> None:
        """Until the part's process has ended, or for so long."""
        if part.pid != self._pid:
            self.close()
            descriptor = part.open_pidfd()
            if descriptor is not None:
                self._pid, self._descriptor = part.pid, descriptor
                asyncio.get_running_loop().add_reader(descriptor, self._end)
        elif self._seen.is_set():
            at_most_s = min(at_most_s, _REAP_S)  # it has ended, and is not reaped yet
            self._seen.clear()
        await wait_for_event(self._seen, at_most_s)

    def _end(self) -> None:
        asyncio.get_running_loop().remove_reader(self._descriptor)
        self._seen.set()

    def close(self) -> None:
        """Give the descriptor back."""
        if self._descriptor >= 0:
            asyncio.get_running_loop().remove_reader(self._descriptor)
            os.close(self._descriptor)
        self._pid, self._descriptor = 0, -1
        self._seen.clear()


@dataclass
class Supervisor:
    """Restarts the processes of one machine.

    `progress` hears what happens to a part, `changed` is called after each change of `records`. `memory_kills` says how
    many processes the kernel has killed for lack of memory.
    """

    parts: dict[str, Part]
    policy: RestartPolicy
    probe: Probe
    progress: StartProgress
    changed: Callable[[], None]
    clock: Clock = field(default_factory=SystemClock)
    rng: random.Random = field(default_factory=random.Random)
    memory_kills: Callable[[], int] = killed_so_far
    records: dict[str, PartRecord] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.records.update({name: PartRecord() for name in self.parts})
        self._memory_kills = MemoryKills(self.memory_kills())

    async def run(self, should_stop: Callable[[], bool]) -> None:
        """Supervise until `should_stop` says so or every part has been given up."""
        keepers = [asyncio.create_task(self._keep(part)) for part in self.parts.values()]
        try:
            while not should_stop() and not all(keeper.done() for keeper in keepers):
                for keeper in keepers:
                    if keeper.done():
                        keeper.result()  # a defect in a keeper must not look like a part that is given up
                await self.clock.sleep(POLL_S)
        finally:
            await cancel_all(keepers)
            for part in self.parts.values():
                part.end_spare()

    @property
    def given_up(self) -> list[str]:
        """Names of the parts that are no longer started."""
        return [name for name, record in self.records.items() if record.state == RunState.GIVEN_UP]

    # --- one part --------------------------------------------------------------------------------------------

    async def _keep(self, part: Part) -> None:
        run = Supervision(self.policy)
        run.started(self.clock.now_s())
        run.heard(self.clock.now_s())
        end = ProcessEnd()
        next_probe_s = 0.0
        next_spare_s = self.clock.now_s() + SPARE_AFTER_S
        try:
            while run.state != RunState.GIVEN_UP:
                if run.state in (RunState.STARTING, RunState.READY) and part.exit_code is not None:
                    self._ended(part, run, self._how(part.exit_code))
                    if run.due(self.clock.now_s()):
                        self._start(part, run)
                    else:
                        self.changed()
                elif run.due(self.clock.now_s()):
                    self._start(part, run)
                elif run.state in (RunState.STARTING, RunState.READY) and self.clock.now_s() >= next_probe_s:
                    await self._look(part, run)
                    trim(part.log_path)
                    next_probe_s = self.clock.now_s() + PROBE_S
                if run.state != RunState.READY:
                    next_spare_s = self.clock.now_s() + SPARE_AFTER_S
                elif part.keeps_spare and self.clock.now_s() >= next_spare_s:
                    self._prepare_spare(part)
                    next_spare_s = self.clock.now_s() + SPARE_AGAIN_S
                await end.wait(part, POLL_S)
        finally:
            end.close()

    def _tell(self, part: Part, text: str, stage: PartStage = PartStage.BUSY) -> None:
        self.progress(part.name, PartNews(stage, text))

    def _how(self, code: int) -> str:
        """An exit code in words, with what may have been its cause."""
        now_s = self.clock.now_s()
        self._memory_kills.look(self.memory_kills(), now_s)
        perhaps = code == -signal.SIGKILL and self._memory_kills.lately(now_s)
        return f"{describe_exit(code)}{', perhaps out of memory' if perhaps else ''}"

    def _ended(self, part: Part, run: Supervision, how: str) -> None:
        record = self.records[part.name]
        run.ended(self.clock.now_s(), how, self.rng.random())
        record.state, record.reason, record.last_end = run.state, run.reason, how
        self._tell(part, f"ended with {how}; {run.reason.removesuffix(f': {how}')}")
        if run.state == RunState.GIVEN_UP:
            self._tell(part, f"the other parts continue without it; its log is {part.log_path}")

    def _start(self, part: Part, run: Supervision) -> None:
        record = self.records[part.name]
        run.started(self.clock.now_s())
        try:
            part.start()
        except OSError as error:  # no memory, no process ids, a full disk
            self._ended(part, run, f"error {error.strerror}")
        else:
            record.restarts += 1
            record.state, record.reason = RunState.STARTING, f"starting again after {record.last_end}"
            self._tell(part, "started again")
        self.changed()

    def _prepare_spare(self, part: Part) -> None:
        try:
            part.prepare_spare()
        except OSError as error:  # no memory, no process ids: its next start takes longer
            self._tell(part, f"no spare process: {error.strerror}", PartStage.READY)

    async def _look(self, part: Part, run: Supervision) -> None:
        record = self.records[part.name]
        self._memory_kills.look(self.memory_kills(), self.clock.now_s())
        if await self.probe(part):
            news = run.heard(self.clock.now_s()) or record.reason != ""
            record.state, record.reason = RunState.READY, ""
            if news:
                self._tell(part, "answers again", PartStage.READY)
                self.changed()
            return
        why = run.silent(self.clock.now_s())
        if why:
            self._tell(part, f"{why}; killed")
            part.send(signal.SIGKILL)
        elif (
            run.state == RunState.READY
            and record.reason == ""
            and self.clock.now_s() - run.heard_s > SILENCE_S
        ):
            record.reason = "does not answer"
            self.changed()
