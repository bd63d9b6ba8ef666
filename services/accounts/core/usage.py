"""What tenants have used: counts for each hour, tenant, key, model and class of work, and the bounded table of a meter.

A meter adds counts to its table and hands them on in numbered parts. A part keeps its number and its counts until it
is known to be written, so writing it twice adds it once.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from enum import StrEnum
from typing import Final, NamedTuple

HOUR_S: Final = 3600
ROWS_MAX: Final = 20_000
TOKENS_MAX: Final = 1 << 40
"""Of one request and kind: an engine that says more is wrong, and its number must not break sums."""
OTHER: Final = "_other"
"""What is counted together. No tenant and no key has this name: theirs do not begin with _."""


class WorkClass(StrEnum):
    """Whether requests wait for an answer or are of a batch."""

    ONLINE = "online"
    OFFLINE = "offline"


class UsageKey(NamedTuple):
    """What is counted apart. `hour_s`: Unix time at which the hour begins in which requests ended."""

    hour_s: int
    tenant: str
    key_id: str
    model: str
    work_class: WorkClass


@dataclass(slots=True)
class UsageCounts:
    """Counts of requests and tokens.

    `failed` and `cancelled` requests are among `requests`, `cached_tokens` among `input_tokens`. `estimated_tokens` are
    the input and output tokens of requests for which no engine said how many there were; they are in the sums, too.
    """

    requests: int = 0
    failed: int = 0
    cancelled: int = 0
    input_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    estimated_tokens: int = 0

    def add(self, other: UsageCounts) -> None:
        """Add another's counts."""
        self.requests += other.requests
        self.failed += other.failed
        self.cancelled += other.cancelled
        self.input_tokens += other.input_tokens
        self.cached_tokens += other.cached_tokens
        self.output_tokens += other.output_tokens
        self.estimated_tokens += other.estimated_tokens

    @property
    def computed_tokens(self) -> int:
        """Input tokens that did not come from a cache."""
        return self.input_tokens - self.cached_tokens

    def check(self) -> None:
        """Raise AssertionError for counts that no requests have."""
        assert all(getattr(self, each) >= 0 for each in COUNTS), "a negative count"
        assert self.failed + self.cancelled <= self.requests, "more ends than requests"
        assert self.cached_tokens <= self.input_tokens, "more cached than input tokens"
        assert self.estimated_tokens <= self.input_tokens + self.output_tokens, (
            "more estimated than all tokens"
        )


COUNTS: Final = tuple(each.name for each in fields(UsageCounts))


class UsageField(StrEnum):
    """What sums are asked for by. The values are names of `UsageKey`."""

    HOUR = "hour_s"
    TENANT = "tenant"
    KEY = "key_id"
    MODEL = "model"
    CLASS = "work_class"


class UsageSum(NamedTuple):
    """Counts of all rows that have the same values in the fields that were asked for, in that order."""

    values: tuple[str | int, ...]
    counts: UsageCounts


class UsagePart(NamedTuple):
    """Counts on their way to a file. `sequence` rises by one with each part of a meter."""

    sequence: int
    rows: Mapping[UsageKey, UsageCounts]


class UsageHour(NamedTuple):
    """An hour of another place's usage. `source` names the place apart from all others."""

    source: str
    hour_s: int
    requests: int


class UsageTable:
    """Counts that are not written yet. `folded` requests were counted under OTHER because too many rows waited."""

    def __init__(self, rows_max: int = ROWS_MAX) -> None:
        self._rows_max = rows_max
        self._rows: dict[UsageKey, UsageCounts] = {}
        self._part: UsagePart | None = None
        self._sequence = 0
        self._folded_hour_s = 0
        self.folded = 0

    def __len__(self) -> int:
        """Rows that wait to be written."""
        return len(self._rows) + (len(self._part.rows) if self._part is not None else 0)

    def add(self, key: UsageKey, counts: UsageCounts) -> None:
        """Count. `counts` is copied."""
        found = self._rows.get(key)
        if found is None:
            if len(self._rows) >= self._rows_max:
                # One hour for all that is folded, so that a disk that stays full does not add rows.
                self._folded_hour_s = self._folded_hour_s or key.hour_s
                key = UsageKey(self._folded_hour_s, OTHER, OTHER, OTHER, key.work_class)
                self.folded += counts.requests
            found = self._rows.setdefault(key, UsageCounts())
        found.add(counts)

    def next_part(self) -> UsagePart | None:
        """The part to write now: the last one again until `written` was called; None when nothing was counted."""
        if self._part is None and self._rows:
            self._sequence += 1
            self._part, self._rows, self._folded_hour_s = UsagePart(self._sequence, self._rows), {}, 0
        return self._part

    def written(self, part: UsagePart) -> None:
        """The part is in the file."""
        if self._part is part:
            self._part = None

    def check(self) -> None:
        """Raise AssertionError when an invariant is broken."""
        # A row of each class beyond the limit is what was folded.
        assert len(self._rows) <= self._rows_max + len(WorkClass), "too many rows"
        for counts in self._rows.values():
            counts.check()


def hour_of(wall_s: float) -> int:
    """When the hour of a moment begins, Unix seconds."""
    return int(wall_s) // HOUR_S * HOUR_S


def tokens_of(said: int) -> int:
    """A number of tokens that a meter can add."""
    return max(0, min(said, TOKENS_MAX))
