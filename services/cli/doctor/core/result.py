"""What a check says: how it stands, about whom, why, and what to do."""

from __future__ import annotations

from enum import StrEnum
from typing import NamedTuple

from mooncache.topology.core.findings import Finding, Grade


class Status(StrEnum):
    """How a check came out. Skipped: there was nothing to look at, or it could not be looked at."""

    PASS = "pass"  # noqa: S105
    WARN = "warn"
    FAIL = "fail"
    SKIPPED = "skipped"


class CheckResult(NamedTuple):
    """One check of one subject. `why` is a sentence without a full stop; `fix` has a command where there is one."""

    check: str
    status: Status
    subject: str
    why: str
    fix: str = ""


_OF_GRADE = {Grade.OK: Status.PASS, Grade.WARN: Status.WARN, Grade.BAD: Status.FAIL}


def passed(check: str, subject: str, why: str) -> CheckResult:
    """All is well."""
    return CheckResult(check, Status.PASS, subject, why)


def warned(check: str, subject: str, why: str, fix: str) -> CheckResult:
    """It works, but not as well or as safely as it could."""
    return CheckResult(check, Status.WARN, subject, why, fix)


def failed(check: str, subject: str, why: str, fix: str) -> CheckResult:
    """Something does not work, or soon will not."""
    return CheckResult(check, Status.FAIL, subject, why, fix)


def skipped(check: str, subject: str, why: str) -> CheckResult:
    """Not looked at; `why` says the reason."""
    return CheckResult(check, Status.SKIPPED, subject, why)


def of_finding(check: str, subject: str, finding: Finding) -> CheckResult:
    """A finding of `mooncache doctor rdma` about a host."""
    return CheckResult(
        check, _OF_GRADE[finding.grade], subject, f"{finding.what}: {finding.found}", finding.advice
    )
