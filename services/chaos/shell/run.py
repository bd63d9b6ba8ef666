"""A run: load, one fault after the other until the time is over, and a record of everything."""

from __future__ import annotations

import asyncio
import random
import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from mooncache.chaos.core.faults import ChaosFault, FaultEffect, fitting
from mooncache.chaos.core.records import Injection, Outcome, Record
from mooncache.chaos.core.schedule import FaultStep, steps
from mooncache.chaos.shell import processes
from mooncache.chaos.shell.load import Asker, known_answers, stream
from mooncache.chaos.shell.target import ChaosTarget
from mooncache.errors import DeadlineExceeded, EngineUnavailable
from mooncache.runtime.tasks import cancel_all

HEAL_S: Final = 180.0
"""All has to be well again so soon after a fault. An engine's start takes most of it."""
_CALM_S: Final = 1.5
_POLL_S: Final = 0.2
_FLIP_TRIES: Final = 20_000
_DRAIN_S: Final = 150.0
_PINS_S: Final = 40.0
"""Pins of a client that was stopped end with its connection (`grant_timeout_ms`)."""

Progress = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class ChaosOptions:
    """What to do: `faults` in random order for `seconds`, and longer until each was made `rounds` times."""

    faults: Sequence[ChaosFault]
    seconds: float
    streams: int
    seed: int
    rounds: int = 0


async def run(target: ChaosTarget, options: ChaosOptions, progress: Progress) -> Record:
    """Load a cluster, break it, and return what was seen.

    Raises:
        InvalidArgument: none of the faults fits it.
        EngineFailed, NoInstances: it does not serve, before any fault.
        PermissionDenied: its processes belong to another user.
    """
    fits = fitting(options.faults, target.parts)
    planned = steps(fits, target.parts, random.Random(options.seed))
    record = Record(options.seed, target.name)
    async with Asker(target.gateway_url, target.token, target.tls) as asker:
        record.model = asker.model
        questions = await known_answers(asker, options.seed, progress)
        pool = target.pool_work(record.pool, secrets.token_hex(4))
        await asyncio.to_thread(pool.start)
        begun_s = time.monotonic()
        stop = asyncio.Event()
        clients = [
            asyncio.create_task(
                stream(asker, questions, record, begun_s, random.Random(f"{options.seed}-{n}"), stop)
            )
            for n in range(options.streams)
        ]
        try:
            breaker = _Breaker(target, options, record, begun_s, progress)
            await breaker.served(since_s=0.0)
            for number, step in enumerate(planned):
                if number >= options.rounds * len(fits) and time.monotonic() - begun_s >= options.seconds:
                    break
                await breaker.inject(step)
        finally:
            stop.set()
            await asyncio.to_thread(pool.end)
            _, late = await asyncio.wait(clients, timeout=_DRAIN_S)
            await cancel_all(late)
        record.seconds = time.monotonic() - begun_s
        progress("pins")
        record.pins_left = await _pins(target)
    return record


class _Breaker:
    """Makes faults one after the other, and waits until each is over."""

    def __init__(
        self, target: ChaosTarget, options: ChaosOptions, record: Record, begun_s: float, progress: Progress
    ) -> None:
        self._target, self._options, self._record = target, options, record
        self._begun_s, self._progress = begun_s, progress
        self._rng = random.Random(f"{options.seed}-bits")

    @property
    def now_s(self) -> float:
        return time.monotonic() - self._begun_s

    async def inject(self, step: FaultStep) -> None:
        """Make one fault, take it back, wait until all is well and has served."""
        done = Injection(step.fault, step.part, self.now_s)
        self._record.injections.append(done)
        self._tell(done, "now")
        try:
            pid = await self._target.pid_of(step.part, step.fault.aim)
            if not pid:
                raise EngineUnavailable(f"{step.part} has no process.")
            await self._break(done, pid)
        except (EngineUnavailable, DeadlineExceeded) as error:
            done.waits_for = error.message
            return
        done.ended_s = self.now_s
        if await self._wait_well(done, step, pid):
            self._tell(done, "waiting for answers")
            await self.served(since_s=done.well_s or 0.0, injection=done)
        await asyncio.sleep(_CALM_S)

    async def served(self, since_s: float, injection: Injection | None = None) -> None:
        """Wait for a right answer to a request that was sent after this moment, or until it is too late."""
        end_s = self.now_s + HEAL_S
        while self.now_s < end_s:
            for answer in reversed(self._record.answers):
                if answer.begun_s >= since_s and answer.outcome is Outcome.RIGHT:
                    if injection is not None:
                        injection.served_s = answer.ended_s
                    return
                if answer.ended_s < since_s:
                    break
            await asyncio.sleep(_POLL_S)
        if injection is not None:
            injection.waits_for = f"no answer within {HEAL_S:g} s"

    async def _break(self, done: Injection, pid: int) -> None:
        match done.fault.effect:
            case FaultEffect.KILL:
                processes.send(pid, processes.KILL)
            case FaultEffect.STOP:
                await processes.stop_for(pid, done.fault.lasts_s)
            case FaultEffect.SLOW:
                await processes.slow_for(pid, done.fault.lasts_s)
            case FaultEffect.FLIP:
                done.flipped = await asyncio.to_thread(processes.flip_bits, pid, _FLIP_TRIES, self._rng)

    async def _wait_well(self, done: Injection, step: FaultStep, pid: int) -> bool:
        """Whether every part was well again in time; the part that was killed runs as another process then."""
        end_s = self.now_s + HEAL_S
        while self.now_s < end_s:
            missing = await self._missing(done, step, pid)
            if not missing:
                done.well_s = self.now_s
                return True
            self._tell(done, missing)
            done.waits_for = missing
            await asyncio.sleep(_POLL_S)
        return False

    async def _missing(self, done: Injection, step: FaultStep, pid: int) -> str:
        if done.fault.effect is FaultEffect.KILL:
            try:
                other = await self._target.pid_of(step.part, done.fault.aim)
            except (EngineUnavailable, DeadlineExceeded) as error:
                return error.message
            if other in (0, pid):
                return f"{step.part} has not been started again"
        return await self._target.not_well()

    def _tell(self, done: Injection, what: str) -> None:
        left_s = max(0.0, self._options.seconds - self.now_s)
        right = sum(answer.outcome is Outcome.RIGHT for answer in self._record.answers)
        self._progress(
            f"{done.fault.name} at {done.target}: {what} ({len(self._record.injections)} faults, "
            f"{right} right answers, {left_s:.0f} s left)"
        )


async def _pins(target: ChaosTarget) -> int:
    """Pins that stay, once the load is over."""
    pins = 0
    for _ in range(round(_PINS_S / _POLL_S)):
        pins = await target.pins_left()
        if not pins:
            break
        await asyncio.sleep(_POLL_S)
    return pins
