"""What the records of a run prove: each promise with what was found, and one verdict."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from mooncache.chaos.core.faults import FaultEffect
from mooncache.chaos.core.records import CheckedAnswer, Injection, Outcome, Record

_SHOWN_MAX = 3


@dataclass(frozen=True, slots=True)
class PromiseCheck:
    """One promise: whether it was kept, and what was seen."""

    promise: str
    kept: bool
    seen: str


@dataclass(frozen=True, slots=True)
class FaultFigures:
    """One injection in figures: requests that overlapped it, and how they ended."""

    injection: Injection
    right: int
    failed: int
    worst_ttft_s: float


@dataclass(frozen=True, slots=True)
class ChaosVerdict:
    """All promises of a run; `kept` when every one of them was."""

    checks: tuple[PromiseCheck, ...]
    faults: tuple[FaultFigures, ...]

    @property
    def kept(self) -> bool:
        return all(check.kept for check in self.checks)


def judge(record: Record) -> ChaosVerdict:
    """Hold a record against the promises."""
    answers = record.answers
    unexcused = [
        answer
        for answer in answers
        if answer.outcome is Outcome.FAILED and not _excused(answer, record.injections)
    ]
    right = [answer for answer in answers if answer.outcome is Outcome.RIGHT]
    cached = sum(answer.cached_tokens for answer in right)
    late = [each for each in record.injections if each.well_s is None or each.served_s is None]
    flipped = sum(each.flipped for each in record.injections)
    flips = any(each.fault.effect is FaultEffect.FLIP for each in record.injections)
    wrong = [answer for answer in answers if answer.outcome is Outcome.WRONG]
    hung = [answer for answer in answers if answer.outcome is Outcome.HUNG]
    pool = record.pool
    checks = (
        PromiseCheck(
            "no wrong token", not wrong, _some(wrong, f"{len(right)} answers equal those without a cache")
        ),
        PromiseCheck(
            "no wrong byte",
            not pool.wrong,
            "; ".join(pool.wrong[:_SHOWN_MAX]) or f"{pool.read} blocks read, {pool.missed} were missing",
        ),
        PromiseCheck(
            "no call hangs",
            not hung and not pool.hung,
            _some(hung, f"{pool.hung} calls of the pool's client hung"),
        ),
        PromiseCheck(
            "requests fail only where the contract says so",
            not unexcused,
            _some(
                unexcused, f"{sum(a.outcome is Outcome.FAILED for a in answers)} failed, all on what was hit"
            ),
        ),
        PromiseCheck(
            "all is well again after each fault",
            not late,
            "; ".join(f"{each.fault.name} at {each.target}: {each.waits_for}" for each in late[:_SHOWN_MAX])
            or f"{len(record.injections)} faults",
        ),
        PromiseCheck("no pin is left", not record.pins_left, f"{record.pins_left} pins"),
        PromiseCheck(
            "the run shows something",
            bool(record.injections and right and cached and pool.read and (flipped or not flips)),
            f"{len(record.injections)} faults, {len(right)} right answers, {cached} tokens from caches, "
            f"{flipped} bits changed",
        ),
    )
    return ChaosVerdict(checks, tuple(_figures(each, answers) for each in record.injections))


def until_s(injection: Injection) -> float:
    """When the fault's consequences were over; infinite when they never were."""
    return injection.well_s if injection.well_s is not None else float("inf")


def _excused(answer: CheckedAnswer, injections: Sequence[Injection]) -> bool:
    return any(each.fault.may_fail and _overlaps(answer, each) for each in injections)


def _overlaps(answer: CheckedAnswer, injection: Injection) -> bool:
    return answer.begun_s <= until_s(injection) and answer.ended_s >= injection.begun_s


def _figures(injection: Injection, answers: Sequence[CheckedAnswer]) -> FaultFigures:
    met = [answer for answer in answers if _overlaps(answer, injection)]
    return FaultFigures(
        injection,
        sum(answer.outcome is Outcome.RIGHT for answer in met),
        sum(answer.outcome is not Outcome.RIGHT for answer in met),
        max((answer.ttft_s for answer in met), default=0.0),
    )


def _some(bad: Sequence[CheckedAnswer], otherwise: str) -> str:
    if not bad:
        return otherwise
    shown = "; ".join(f"at {answer.begun_s:.1f} s: {answer.detail}" for answer in bad[:_SHOWN_MAX])
    return f"{len(bad)}: {shown}"
