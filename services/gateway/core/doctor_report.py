"""What a run of `mooncache doctor` says, as the console keeps it: the parts that are asked, then the results.

Both come from another process. They are read with a cap, and what is no result is refused as a whole.
"""

from __future__ import annotations

from collections import Counter
from typing import Any, Final, Literal, NamedTuple

import msgspec

CHECKS_MAX: Final = 2000
PARTS_MAX: Final = 64
_TEXT_CHARS_MAX: Final = 2000
STATUSES: Final = ("fail", "warn", "pass", "skipped")
"""As the doctor has them, the worst first."""


class DoctorRow(msgspec.Struct, frozen=True):
    """One check of one subject. `fix`: what to do, "" when there is nothing."""

    group: str
    check: str
    status: Literal["fail", "warn", "pass", "skipped"]
    subject: str
    why: str
    fix: str = ""


class _DoctorDocument(msgspec.Struct):
    checks: list[DoctorRow]
    elapsed_s: float


class _DoctorStep(msgspec.Struct):
    part: str
    is_over: bool


class DoctorReport(NamedTuple):
    """Results, the worst first; `counts` by status are of all of them, `left_out` of them are not in `rows`."""

    rows: list[DoctorRow]
    counts: dict[str, int]
    left_out: int
    elapsed_s: float


_DOCUMENTS: Final = msgspec.json.Decoder(_DoctorDocument)
_STEPS: Final = msgspec.json.Decoder(_DoctorStep)


def read_report(data: bytes) -> DoctorReport:
    """What `mooncache doctor --json` wrote. Raises ValueError for anything else."""
    try:
        found = _DOCUMENTS.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ValueError(f"it is no report: {str(error)[:200]}") from None
    rows = sorted(found.checks, key=lambda row: STATUSES.index(row.status))
    counted = Counter(row.status for row in rows)
    kept = [_cut(row) for row in rows[:CHECKS_MAX]]
    counts = {status: counted[status] for status in STATUSES}
    return DoctorReport(kept, counts, len(rows) - len(kept), found.elapsed_s)


def _cut(row: DoctorRow) -> DoctorRow:
    texts: dict[str, Any] = {name: getattr(row, name)[:_TEXT_CHARS_MAX] for name in ("subject", "why", "fix")}
    return msgspec.structs.replace(row, **texts)


class DoctorSteps:
    """The parts that a run asks, in the order in which they began, and which of them have ended."""

    def __init__(self) -> None:
        self._is_over: dict[str, bool] = {}

    def take(self, line: bytes) -> bool:
        """A line of `--steps`. False for any other line, which changes nothing."""
        try:
            step = _STEPS.decode(line)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            return False
        part = step.part[:_TEXT_CHARS_MAX]
        if part in self._is_over or len(self._is_over) < PARTS_MAX:
            self._is_over[part] = step.is_over
        return True

    def rows(self) -> list[dict[str, Any]]:
        """A row for each part."""
        return [{"part": part, "is_over": is_over} for part, is_over in self._is_over.items()]
