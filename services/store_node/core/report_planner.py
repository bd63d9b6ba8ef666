"""Which report the node sends to the master next, as a pure state machine.

Idea: the node owns the truth; the master's directory is derived from two kinds of reports. Deltas are
contiguous, sequence-numbered pieces of the native event log. A full report (BEGIN, PARTs, END) replaces all the
master knew about the node. The planner asks its shell for one small action at a time (`next_step`) and learns the
outcome, so every order of losses and repeats can be tested without a network.

Invariants (`check`):
- at most one message is in flight, and at most one message's worth of records is held: the native event log is the
  buffer, and its overflow only leads to a full report;
- a delta starts exactly at `acked_seq + 1`;
- the base sequence of a full report is taken before its first snapshot page, so that replaying the events after the
  base repairs whatever changed while the snapshot ran.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

RECORD_BYTES = 56
MAX_MESSAGE_BYTES = 4 << 20


class ReportKind(enum.Enum):
    DELTA = "delta"
    FULL_BEGIN = "full_begin"
    FULL_PART = "full_part"
    FULL_END = "full_end"


@dataclass(frozen=True, slots=True)
class BlockReport:
    """One ReportBlocks message, still without the node's identity."""

    kind: ReportKind
    report_id: int
    first_seq: int
    last_seq: int
    part_index: int
    records: bytes


# --- what the planner asks its shell to do ------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Drain:
    """Take at most `max_events` events from the log and hand them to `drained`."""

    max_events: int


@dataclass(frozen=True, slots=True)
class TakeBase:
    """Empty the event log, then read its newest sequence number and hand that to `base_taken`."""


@dataclass(frozen=True, slots=True)
class TakePage:
    """Read one page of the snapshot and hand it to `page_taken`."""

    cursor: int
    max_records: int


@dataclass(frozen=True, slots=True)
class SendReport:
    """Send the report; then call `acknowledged` or `send_failed`."""

    report: BlockReport


@dataclass(frozen=True, slots=True)
class Idle:
    """Nothing to do until an event arrives or the master asks for something."""


ReportStep = Drain | TakeBase | TakePage | SendReport | Idle


class _Phase(enum.Enum):
    DETACHED = "detached"  # no master has accepted this node yet
    DELTA = "delta"
    FULL_BASE = "full_base"  # a full report is due; the base is not taken yet
    FULL_BEGIN = "full_begin"
    FULL_PARTS = "full_parts"
    FULL_END = "full_end"


class ReportPlanner:
    """Plans a node's reports to the master. `max_message_bytes` bounds the records of one message."""

    def __init__(self, max_message_bytes: int = MAX_MESSAGE_BYTES) -> None:
        if max_message_bytes < RECORD_BYTES:
            raise ValueError(f"max_message_bytes must hold at least one record ({RECORD_BYTES} bytes)")
        self._max_records = max_message_bytes // RECORD_BYTES
        self._phase = _Phase.DETACHED
        self._acked_seq = 0
        self._pending: BlockReport | None = None
        self._report_id = 0
        self._base_seq = 0
        self._cursor = 0
        self._snapshot_ended = False
        self._part_index = 0
        self._idle = False
        self.full_reports_started = 0
        self.full_reports_finished = 0
        self.last_full_reason = ""

    # --- what the master says --------------------------------------------------------------------------------

    @property
    def acked_seq(self) -> int:
        """Sequence number of the last event the master has confirmed."""
        return self._acked_seq

    @property
    def reporting_full(self) -> bool:
        return self._phase not in (_Phase.DETACHED, _Phase.DELTA)

    @property
    def attached(self) -> bool:
        return self._phase is not _Phase.DETACHED

    def attach(self, want_full_report: bool, reason: str = "registered") -> None:
        """A master accepted this node. A first contact always leads to a full report."""
        if self._phase is _Phase.DETACHED or want_full_report:
            self.request_full(reason)
        self._idle = False

    def detach(self) -> None:
        """The master is gone or changed: nothing is sent before the next `attach`, which reports in full."""
        self._phase = _Phase.DETACHED
        self._pending = None
        self._idle = False

    def request_full(self, reason: str) -> None:
        """Begin a full report from the start, whatever was going on."""
        self._phase = _Phase.FULL_BASE
        self._pending = None
        self._idle = False
        self.last_full_reason = reason

    # --- the loop --------------------------------------------------------------------------------------------

    def next_step(self) -> ReportStep:
        """The one action to perform now."""
        if self._phase is _Phase.DETACHED:
            return Idle()
        if self._pending is not None:
            return SendReport(self._pending)
        if self._phase is _Phase.FULL_BASE:
            return TakeBase()
        if self._phase is _Phase.FULL_PARTS:
            return TakePage(self._cursor, self._max_records)
        if self._idle:
            self._idle = False
            return Idle()
        return Drain(self._max_records)

    def drained(self, first_seq: int, last_seq: int, overflow: bool, records: bytes) -> None:
        """The events `first_seq..last_seq` left the log; `overflow` says that older ones were lost."""
        if self._phase is not _Phase.DELTA:
            return  # the answer to a question that no longer matters: the full report covers it
        if overflow:
            self.request_full("event log overflow")
            return
        if not records:
            self._idle = True
            return
        if len(records) != (last_seq - first_seq + 1) * RECORD_BYTES:
            self.request_full("event batch does not match its sequence numbers")
            return
        if last_seq <= self._acked_seq:
            return  # all of it is already covered by the full report's base
        if first_seq > self._acked_seq + 1:
            self.request_full("gap in the event log")
            return
        skip = self._acked_seq + 1 - first_seq
        self._pending = BlockReport(
            ReportKind.DELTA, 0, self._acked_seq + 1, last_seq, 0, records[skip * RECORD_BYTES :]
        )

    def base_taken(self, seq: int) -> None:
        """The newest event before the snapshot is `seq`."""
        if self._phase is not _Phase.FULL_BASE:
            return
        self._report_id += 1
        self._base_seq = seq
        self._cursor = 0
        self._snapshot_ended = False
        self._part_index = 0
        self._phase = _Phase.FULL_BEGIN
        self.full_reports_started += 1
        self._pending = BlockReport(ReportKind.FULL_BEGIN, self._report_id, seq, seq, 0, b"")

    def page_taken(self, next_cursor: int, records: bytes) -> None:
        """One page of the snapshot; `next_cursor` 0 means that it was the last."""
        if self._phase is not _Phase.FULL_PARTS:
            return
        self._cursor = next_cursor
        self._snapshot_ended = next_cursor == 0
        if records:
            self._pending = BlockReport(
                ReportKind.FULL_PART,
                self._report_id,
                self._base_seq,
                self._base_seq,
                self._part_index,
                records,
            )
        elif self._snapshot_ended:
            self._end_full()

    def acknowledged(self, acked_seq: int, need_full: bool) -> None:
        """The master answered the message in flight."""
        sent, self._pending = self._pending, None
        if need_full:
            self.request_full("requested by the master")
            return
        if sent is None:
            return
        if sent.kind is ReportKind.DELTA:
            if acked_seq < sent.last_seq:
                self.request_full("the master confirmed less than was sent")
            else:
                self._acked_seq = sent.last_seq
        elif sent.kind is ReportKind.FULL_BEGIN:
            self._phase = _Phase.FULL_PARTS
        elif sent.kind is ReportKind.FULL_PART:
            self._part_index += 1
            if self._snapshot_ended:
                self._end_full()
        else:
            self._phase = _Phase.DELTA
            self._acked_seq = self._base_seq
            self.full_reports_finished += 1

    def send_failed(self) -> None:
        """No answer: the same message is sent again (the master ignores repeats)."""

    def _end_full(self) -> None:
        self._phase = _Phase.FULL_END
        self._pending = BlockReport(
            ReportKind.FULL_END, self._report_id, self._base_seq, self._base_seq, self._part_index, b""
        )

    def check(self) -> None:
        """Every invariant; raises AssertionError with the one that does not hold."""
        if self._pending is not None:
            assert len(self._pending.records) <= self._max_records * RECORD_BYTES, "a message is too large"
            assert len(self._pending.records) % RECORD_BYTES == 0, "a record is cut"
            if self._pending.kind is ReportKind.DELTA:
                assert self._phase is _Phase.DELTA, "a delta while a full report runs"
                assert self._pending.first_seq == self._acked_seq + 1, "a delta does not follow the last ack"
        assert self._phase is not _Phase.DETACHED or self._pending is None, "a message without a master"
        assert self.full_reports_finished <= self.full_reports_started
