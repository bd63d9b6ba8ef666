"""What is found of each promise, and of all of them. What could not be tried has a reason, and breaks nothing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from mooncache.errors import InvalidArgument

_SEEN_CHARS_MAX: Final = 600


class PromiseBrokenError(Exception):
    """What was promised did not hold; the text says what was seen."""


class NotOfferedError(Exception):
    """A promise cannot be tried here; the text says why."""


class PromiseFamily(StrEnum):
    """What promises are about."""

    IDENTITY = "identity"
    BYTES = "bytes"
    ANSWERS = "answers"
    LIFETIMES = "lifetimes"
    LOAD = "load"
    FAILURE = "failure"


class PromiseOutcome(StrEnum):
    """How a promise came off."""

    PASS = "pass"  # noqa: S105 - no password
    FAIL = "fail"
    NOT_APPLICABLE = "not applicable"


@dataclass(frozen=True, slots=True)
class PromiseText:
    """A promise: its short name for options, and the sentence."""

    name: str
    family: PromiseFamily
    sentence: str


@dataclass(frozen=True, slots=True)
class PromiseVerdict:
    """One promise as it was found. `seen` says what was tried, or what broke, or why it was not tried."""

    promise: PromiseText
    outcome: PromiseOutcome
    seen: str
    seconds: float


@dataclass(frozen=True, slots=True)
class ConformanceReport:
    """All promises that were tried on `subject`; the same tries again with the same `seed`."""

    subject: str
    seed: int
    seconds: float
    verdicts: tuple[PromiseVerdict, ...]

    def count(self, outcome: PromiseOutcome) -> int:
        """How many promises came off so."""
        return sum(each.outcome is outcome for each in self.verdicts)

    @property
    def kept(self) -> bool:
        """No promise was broken, and some promise was tried."""
        return not self.count(PromiseOutcome.FAIL) and self.count(PromiseOutcome.PASS) > 0


def verdict_of(promise: PromiseText, ended: str | Exception, seconds: float) -> PromiseVerdict:
    """The verdict from what a try answered or raised."""
    if isinstance(ended, str):
        outcome, seen = PromiseOutcome.PASS, ended
    elif isinstance(ended, NotOfferedError):
        outcome, seen = PromiseOutcome.NOT_APPLICABLE, str(ended)
    elif isinstance(ended, PromiseBrokenError):
        outcome, seen = PromiseOutcome.FAIL, str(ended)
    else:
        outcome, seen = PromiseOutcome.FAIL, f"raised {type(ended).__name__}: {ended}"
    return PromiseVerdict(promise, outcome, seen[:_SEEN_CHARS_MAX], seconds)


def chosen(promises: Sequence[PromiseText], only: Sequence[str]) -> list[PromiseText]:
    """The promises with these names (a family's name means all of it), in the order in which they are tried.

    Raises:
        InvalidArgument: a name that none has.
    """
    known = {promise.name for promise in promises} | {str(promise.family) for promise in promises}
    for name in only:
        if name not in known:
            names = ", ".join(promise.name for promise in promises)
            raise InvalidArgument(f"There is no promise {name!r}. Promises: {names}.")
    return [each for each in promises if not only or each.name in only or str(each.family) in only]
