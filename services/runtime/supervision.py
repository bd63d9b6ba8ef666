"""When to start, kill and give up a process: a decision from its history and the time.

States: down -> starting -> ready -> down ... A run that does not become healthy in time, or that was healthy and is
silent for too long, hangs: it has to be killed. So has one that answers and has requests, none of which makes
progress. After each end there is a pause that doubles with every end within the window (ten minutes);
too many ends within the window, and it is given up: something is wrong that restarting does not cure.

A worker supervises its engine by it, `mooncache up` the processes of the machine.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final

from mooncache.runtime.backoff import jittered_s, step_s

WINDOW_S: Final = 600.0
STALL_FACTOR: Final = (
    4.0  # one step of a long prompt moves no number, and takes longer than an answer to /health
)


class RunState(StrEnum):
    """What a supervised process is doing."""

    DOWN = "down"
    STARTING = "starting"
    READY = "ready"
    GIVEN_UP = "given_up"


@dataclass(frozen=True, slots=True)
class RestartPolicy:
    """Times in seconds; `hang_timeout_s` 0 leaves silent runs alone. The defaults are an engine's."""

    start_timeout_s: float = 600.0
    hang_timeout_s: float = 30.0
    backoff_first_s: float = 1.0
    backoff_max_s: float = 60.0
    restart_count_max: int = 10
    """Restarts within the window; one more end, and the process is given up."""
    first_restart_count_max: int | None = None
    """The same for a process that was never ready; None: no other number."""
    window_s: float = WINDOW_S
    first_at_once: bool = False
    """Whether a process that was ready, and ends for the first time within the window, is started again at once."""


def pause_s(policy: RestartPolicy, ends: int, jitter: float) -> float:
    """Pause before the next start after `ends` ends within the window; `jitter` is from 0 to 1.

    Between half of the step and the whole of it, so that several processes do not load at the same moment again
    and again.
    """
    return jittered_s(step_s(ends - 1, policy.backoff_first_s, policy.backoff_max_s), jitter)


@dataclass(slots=True)
class Supervision:
    """The state of one supervised process. `now_s` is monotonic; the shell carries out what `due` and `hangs` say."""

    policy: RestartPolicy
    state: RunState = RunState.DOWN
    reason: str = "not started yet"
    starts: int = 0
    next_start_s: float = 0.0
    started_s: float = 0.0
    heard_s: float = 0.0
    stuck_s: float | None = None
    ends: deque[float] = field(default_factory=deque)
    was_ready: bool = False

    def due(self, now_s: float) -> bool:
        """Whether it has to be started now."""
        return self.state == RunState.DOWN and now_s >= self.next_start_s

    def started(self, now_s: float) -> None:
        """A run began."""
        assert self.state == RunState.DOWN, f"started while {self.state}"
        self.state, self.reason = RunState.STARTING, "loading"
        self.started_s = self.heard_s = now_s
        self.stuck_s = None
        self.starts += 1

    def heard(self, now_s: float) -> bool:
        """It is healthy; True when that is news."""
        if self.state not in (RunState.STARTING, RunState.READY):
            return False
        news = self.state == RunState.STARTING
        self.state, self.reason, self.heard_s = RunState.READY, "", now_s
        self.was_ready = True
        return news

    def silent(self, now_s: float) -> str:
        """It did not answer; returns why it has to be killed, "" while there is hope."""
        if self.state == RunState.STARTING and now_s - self.started_s > self.policy.start_timeout_s:
            return f"not healthy within {self.policy.start_timeout_s:g} s"
        if self.state == RunState.READY:
            self.reason = f"no answer for {now_s - self.heard_s:.1f} s"
            if 0 < self.policy.hang_timeout_s < now_s - self.heard_s:
                return f"no answer for {self.policy.hang_timeout_s:g} s"
        return ""

    def progress(self, now_s: float, *, moved: bool) -> None:
        """A reading of the engine's numbers: whether any has moved since the last one, or nothing has to."""
        if moved:
            self.stuck_s = None
        elif self.stuck_s is None:
            self.stuck_s = now_s

    def stalled(self, now_s: float) -> str:
        """Why an engine that answers has to be killed all the same; "" when it works."""
        limit_s = STALL_FACTOR * self.policy.hang_timeout_s
        if self.state == RunState.READY and self.stuck_s is not None and now_s - self.stuck_s > limit_s:
            return f"requests run, and nothing moved for {limit_s:g} s"
        return ""

    def ended(self, now_s: float, why: str, jitter: float) -> bool:
        """A run ended; False when there will be no other one. `reason` and `next_start_s` say what comes."""
        while self.ends and now_s - self.ends[0] > self.policy.window_s:
            self.ends.popleft()
        self.ends.append(now_s)
        if len(self.ends) > self._restart_count_max():
            self.state = RunState.GIVEN_UP
            self.reason = (
                f"given up after {len(self.ends)} failures "
                f"within {self.policy.window_s / 60:g} minutes: {why}"
            )
            return False
        at_once = self.policy.first_at_once and self.state == RunState.READY and len(self.ends) == 1
        wait_s = 0.0 if at_once else pause_s(self.policy, len(self.ends), jitter)
        self.state, self.next_start_s = RunState.DOWN, now_s + wait_s
        self.reason = f"restarting in {wait_s:.1f} s: {why}"
        return True

    def _restart_count_max(self) -> int:
        first, later = self.policy.first_restart_count_max, self.policy.restart_count_max
        return later if self.was_ready or first is None else min(first, later)

    def lost(self, now_s: float, why: str) -> None:
        """An engine that is run elsewhere is gone: look for it again at once, forever."""
        self.state, self.reason, self.next_start_s = RunState.DOWN, why, now_s

    def check(self) -> None:
        """Raise AssertionError when an invariant is broken."""
        assert len(self.ends) <= self.policy.restart_count_max + 1, "the history grows without limit"
        assert self.state in (RunState.DOWN, RunState.STARTING, RunState.READY, RunState.GIVEN_UP), self.state
        assert len(self.ends) <= self.starts, "more ends than starts"


def exit_words(code: int) -> str:
    """An exit status of the guard in words."""
    return f"signal {code - 128}" if code > 128 else f"exit code {code}"
