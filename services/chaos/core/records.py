"""What a run writes down. Times are seconds since its begin."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from enum import StrEnum

from mooncache.chaos.core.faults import ChaosFault


class Outcome(StrEnum):
    """How a request ended."""

    RIGHT = "right"
    WRONG = "wrong"  # other tokens than without a cache
    FAILED = "failed"  # an error that the client could read
    HUNG = "hung"  # no end within the time limit


@dataclass(frozen=True, slots=True)
class CheckedAnswer:
    """One request."""

    begun_s: float
    ended_s: float
    outcome: Outcome
    ttft_s: float = 0.0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    detail: str = ""


@dataclass(slots=True)
class Injection:
    """One fault: when it was made and taken back, when every part was well again, when an answer came after that.

    `well_s` and `served_s` are None when that did not happen in time. `flipped` counts changed bits.
    """

    fault: ChaosFault
    target: str
    begun_s: float
    ended_s: float = 0.0
    well_s: float | None = None
    served_s: float | None = None
    flipped: int = 0
    waits_for: str = ""
    """What was not well, when time was over."""


@dataclass(slots=True)
class PoolTally:
    """What a client of the pool alone saw; `wrong` are blocks with other bytes than were put."""

    read: int = 0
    missed: int = 0
    put: int = 0
    wrong: list[str] = field(default_factory=list)
    hung: int = 0
    errors: Counter[str] = field(default_factory=Counter)


@dataclass(slots=True)
class Record:
    """A whole run."""

    seed: int
    cluster: str = ""
    model: str = ""
    seconds: float = 0.0
    answers: list[CheckedAnswer] = field(default_factory=list)
    injections: list[Injection] = field(default_factory=list)
    pool: PoolTally = field(default_factory=PoolTally)
    pins_left: int = 0
