"""Turning block reports that may be lost, late, repeated or reordered into one node's part of the directory.

A node numbers its block changes from 1 for each incarnation. A *delta* carries a run of changes. A *full
report* is a fuzzy picture: BEGIN names the base (the newest change when the picture was begun), PARTs list
blocks as they were at some moment after it, END says how many parts there are. Replaying the changes after
the base, in order, makes the picture exact, and replaying a change that it already shows does no harm.

Invariant: when `complete` is true, the node's part of the directory followed by the node's changes after
`acked_seq` gives the node's contents. Whatever would break this (a gap, too many changes waiting, a report
that stops coming) ends `complete` and asks for a new full report. Report ids are drawn at random, so an
unknown BEGIN is judged by its base: an old base is a late message.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Protocol

from mooncache import errors

RECORD_BYTES = 56
_PAST_REPORTS = 64


class HolderIndex(Protocol):
    """What reports need of the directory; `holder` is the node's index."""

    def apply(self, holder: int, records: bytes) -> None:
        """Apply packed records in order."""

    def begin_full(self, holder: int) -> None:
        """Mark everything of the holder as unseen."""

    def end_full(self, holder: int) -> int:
        """Drop what was not seen since `begin_full`; return how many blocks."""

    def drop_holder(self, holder: int) -> int:
        """Drop everything of the holder; return how many blocks."""


@dataclass(frozen=True, slots=True)
class ReportRules:
    """Limits of reports."""

    buffered_bytes_max: int = 16 << 20  # records of deltas that wait for a full report to end, for each node
    parts_max: int = 65536  # parts of one full report
    full_timeout_s: float = 15.0  # silence after which a full report under way is given up


@dataclass(frozen=True, slots=True)
class Ack:
    """The answer to a report. `acked_seq`: need not be sent again unless `need_full`."""

    acked_seq: int
    need_full: bool
    next_part_index: int = 0


@dataclass(slots=True)
class ReportCounters:
    """What happened since the start, over all nodes."""

    deltas: int = 0
    repeats: int = 0
    gaps: int = 0
    overflows: int = 0
    full_begun: int = 0
    full_done: int = 0
    full_abandoned: int = 0
    records: int = 0


@dataclass(slots=True)
class _Full:
    report_id: int
    base_seq: int
    heard_s: float
    seen: set[int] = field(default_factory=set)
    next_part: int = 0
    part_count: int | None = None
    # Changes after the base, in order, contiguous; applied when the report ends.
    waiting: list[tuple[int, bytes]] = field(default_factory=list)
    waiting_bytes: int = 0

    @property
    def accepted_seq(self) -> int:
        return self.waiting[-1][0] if self.waiting else self.base_seq


class NodeReports:
    """The sequence logic of one incarnation of one node."""

    def __init__(self, holder: int, index: HolderIndex, rules: ReportRules, counters: ReportCounters) -> None:
        self.holder = holder
        self.acked_seq = 0
        self.complete = False
        self._index = index
        self._rules = rules
        self._counters = counters
        self._full: _Full | None = None
        self._past: deque[int] = deque(maxlen=_PAST_REPORTS)

    @property
    def full_under_way(self) -> bool:
        """Whether a full report has begun and not ended."""
        return self._full is not None

    @property
    def want_full(self) -> bool:
        """Whether the node should be asked for a full report."""
        return not self.complete and self._full is None

    def lose(self) -> None:
        """Forget the contents (the node died or its entries were dropped).

        Late messages stay recognisable.
        """
        self._abandon()
        self.complete = False
        self.acked_seq = 0

    def delta(self, first_seq: int, last_seq: int, records: bytes, now_s: float) -> Ack:
        """Take in changes first_seq..last_seq.

        Raises InvalidArgument for numbers or records that are not possible.
        """
        _check_records(records)
        if first_seq < 1 or last_seq < first_seq:
            raise errors.InvalidArgument(
                f"a delta needs 1 <= first_seq <= last_seq, not {first_seq}..{last_seq}"
            )
        self._counters.deltas += 1
        if self._full is not None:
            return self._delta_during_full(self._full, first_seq, last_seq, records)
        if not self.complete:
            return Ack(self.acked_seq, need_full=True)
        if last_seq <= self.acked_seq:
            self._counters.repeats += 1
            return self._ack()
        if first_seq > self.acked_seq + 1:
            self._counters.gaps += 1
            self.complete = False
            return self._ack()
        # A run that overlaps what is known is applied whole: replaying the known tail in order ends in the
        # same state.
        self._apply(records)
        self.acked_seq = last_seq
        return self._ack()

    def full_begin(self, report_id: int, base_seq: int, now_s: float) -> Ack:
        """Begin a full report whose picture is not older than change `base_seq`."""
        if report_id == 0:
            raise errors.InvalidArgument("report_id 0 is kept for deltas")
        current = self._full
        if current is not None and current.report_id == report_id:
            current.heard_s = now_s
            return self._ack()
        newest_base = current.base_seq if current is not None else self.acked_seq
        if report_id in self._past or base_seq < newest_base:
            self._counters.repeats += 1
            return self._ack()
        self._abandon()
        self.complete = False
        self._full = _Full(report_id, base_seq, now_s)
        self._counters.full_begun += 1
        self._index.begin_full(self.holder)
        return self._ack()

    def full_part(self, report_id: int, part_index: int, records: bytes, now_s: float) -> Ack:
        """Take in one part; any order, repeats allowed."""
        _check_records(records)
        full = self._full
        if full is None or full.report_id != report_id:
            return self._stray()
        limit = self._rules.parts_max if full.part_count is None else full.part_count
        if part_index >= limit:
            raise errors.LimitExceeded(f"part {part_index} of a full report that may have {limit} parts")
        full.heard_s = now_s
        if part_index in full.seen:
            self._counters.repeats += 1
            return self._ack()
        full.seen.add(part_index)
        while full.next_part in full.seen:
            full.next_part += 1
        self._apply(records)
        self._try_finish(full)
        return self._ack()

    def full_end(self, report_id: int, part_count: int, now_s: float) -> Ack:
        """Note how many parts there are; the report ends when all of them have come."""
        full = self._full
        if full is None or full.report_id != report_id:
            return self._stray()
        if part_count > self._rules.parts_max or any(part >= part_count for part in full.seen):
            raise errors.InvalidArgument(f"a full report cannot have {part_count} parts")
        full.heard_s = now_s
        full.part_count = part_count
        self._try_finish(full)
        return self._ack()

    def tick(self, now_s: float) -> bool:
        """Give up a full report that stopped coming; returns whether one was given up."""
        if self._full is None or now_s - self._full.heard_s < self._rules.full_timeout_s:
            return False
        self._abandon()
        return True

    def _delta_during_full(self, full: _Full, first_seq: int, last_seq: int, records: bytes) -> Ack:
        if last_seq <= full.accepted_seq:
            self._counters.repeats += 1
        elif first_seq > full.accepted_seq + 1:
            self._counters.gaps += 1
            self._abandon()
        elif full.waiting_bytes + len(records) > self._rules.buffered_bytes_max:
            self._counters.overflows += 1
            self._abandon()
        else:
            full.waiting.append((last_seq, records))
            full.waiting_bytes += len(records)
        return self._ack()

    def _try_finish(self, full: _Full) -> None:
        if full.part_count is None or len(full.seen) < full.part_count:
            return
        self._index.end_full(self.holder)
        self.acked_seq = full.base_seq
        for last_seq, records in full.waiting:
            self._apply(records)
            self.acked_seq = last_seq
        self._past.append(full.report_id)
        self._full = None
        self.complete = True
        self._counters.full_done += 1

    def _abandon(self) -> None:
        if self._full is not None:
            self._past.append(self._full.report_id)
            self._full = None
            self._counters.full_abandoned += 1

    def _stray(self) -> Ack:
        # A part of a report that is not under way: late, or the node's report was superseded by a late BEGIN.
        # The node that still waits for this answer learns whether it has to start again.
        self._counters.repeats += 1
        return Ack(self.acked_seq, need_full=not self.complete)

    def _ack(self) -> Ack:
        if self._full is not None:
            return Ack(self._full.accepted_seq, need_full=False, next_part_index=self._full.next_part)
        return Ack(self.acked_seq, need_full=not self.complete)

    def _apply(self, records: bytes) -> None:
        if records:
            self._index.apply(self.holder, records)
            self._counters.records += len(records) // RECORD_BYTES


def _check_records(records: bytes) -> None:
    if len(records) % RECORD_BYTES:
        raise errors.InvalidArgument(
            f"records must be a multiple of {RECORD_BYTES} bytes, not {len(records)}"
        )
