"""The planner against a model: whatever is lost, late or repeated, the master's view becomes the node's truth."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mooncache.runtime.backoff import Backoff
from mooncache.store_node.core.report_planner import (
    RECORD_BYTES,
    BlockReport,
    Drain,
    Idle,
    ReportKind,
    ReportPlanner,
    SendReport,
    TakeBase,
    TakePage,
)


def record(kind: int, key: int) -> bytes:
    return bytes([kind]) + bytes(23) + key.to_bytes(32, "little")


@dataclass
class ModelNode:
    """A set of keys and a bounded event log, with the behaviour that the native server promises."""

    capacity: int
    keys: set[int] = field(default_factory=set)
    log: list[tuple[int, bytes]] = field(default_factory=list)
    seq: int = 0
    overflow: bool = False

    def change(self, key: int) -> None:
        kind = 2 if key in self.keys else 1
        self.keys ^= {key}
        self.seq += 1
        self.log.append((self.seq, record(kind, key)))
        if len(self.log) > self.capacity:
            self.log.pop(0)
            self.overflow = True

    def drain(self, limit: int) -> tuple[int, int, bool, bytes]:
        batch, self.log = self.log[:limit], self.log[limit:]
        overflow, self.overflow = self.overflow, False
        if not batch:
            return self.seq + 1, self.seq, overflow, b""
        return batch[0][0], batch[-1][0], overflow, b"".join(item for _, item in batch)

    def snapshot(self, cursor: int, limit: int) -> tuple[int, bytes]:
        rest = sorted(key for key in self.keys if key >= cursor)
        page = rest[:limit]
        following = page[-1] + 1 if len(rest) > limit else 0
        return following, b"".join(record(1, key) for key in page)


@dataclass
class ModelMaster:
    keys: set[int] = field(default_factory=set)
    acked: int = 0
    known: bool = False
    full_id: int = 0
    full_base: int = 0
    full_keys: set[int] = field(default_factory=set)
    parts: int = 0

    def _apply(self, keys: set[int], records: bytes) -> None:
        for start in range(0, len(records), RECORD_BYTES):
            key = int.from_bytes(records[start + 24 : start + 56], "little")
            (keys.add if records[start] == 1 else keys.discard)(key)

    def report(self, report: BlockReport) -> tuple[int, bool]:
        if report.kind is ReportKind.FULL_BEGIN:
            if report.report_id != self.full_id:
                self.full_id, self.full_base = report.report_id, report.first_seq
                self.full_keys, self.parts = set(), 0
            return self.acked, False
        if report.kind is ReportKind.FULL_PART:
            if report.report_id != self.full_id or report.part_index > self.parts:
                return self.acked, True
            if report.part_index == self.parts:
                self._apply(self.full_keys, report.records)
                self.parts += 1
            return self.acked, False
        if report.kind is ReportKind.FULL_END:
            if report.report_id != self.full_id or report.part_index != self.parts:
                return self.acked, True
            if self.acked < self.full_base or not self.known:
                self.keys, self.acked, self.known = set(self.full_keys), self.full_base, True
            elif self.acked == self.full_base:
                self.keys = set(self.full_keys)
            return self.acked, False
        if not self.known or report.first_seq > self.acked + 1:
            return self.acked, True
        if report.last_seq > self.acked:
            skip = self.acked + 1 - report.first_seq
            self._apply(self.keys, report.records[skip * RECORD_BYTES :])
            self.acked = report.last_seq
        return self.acked, False


def step(planner: ReportPlanner, node: ModelNode, master: ModelMaster, fate: str) -> bool:
    """One action; returns True when the planner is idle. `fate`: ok, lost (no request), mute (no answer), twice."""
    action = planner.next_step()
    match action:
        case Idle():
            return True
        case Drain(limit):
            planner.drained(*node.drain(limit))
        case TakeBase():
            while node.drain(1000)[3]:
                pass
            planner.base_taken(node.seq)
        case TakePage(cursor, limit):
            planner.page_taken(*node.snapshot(cursor, limit))
        case SendReport(report):
            if fate == "lost":
                planner.send_failed()
            else:
                answer = master.report(report)
                if fate == "twice":
                    answer = master.report(report)
                if fate == "mute":
                    planner.send_failed()
                else:
                    planner.acknowledged(*answer)
    planner.check()
    return False


def settle(planner: ReportPlanner, node: ModelNode, master: ModelMaster) -> None:
    for _ in range(100_000):
        if step(planner, node, master, "ok"):
            return
    raise AssertionError("the planner never became idle")


@settings(max_examples=150, deadline=None)
@given(
    history=st.lists(
        st.one_of(
            st.tuples(st.just("change"), st.integers(0, 30)),
            st.tuples(st.just("step"), st.sampled_from(["ok", "ok", "lost", "mute", "twice"])),
            st.tuples(st.just("master"), st.sampled_from(["kill", "ask"])),
        ),
        max_size=200,
    ),
    capacity=st.integers(1, 40),
    message_records=st.integers(1, 7),
)
def test_master_converges_to_the_node(
    history: list[tuple[str, object]], capacity: int, message_records: int
) -> None:
    planner = ReportPlanner(message_records * RECORD_BYTES)
    node, master = ModelNode(capacity), ModelMaster()
    planner.attach(want_full_report=True)
    for what, detail in history:
        if what == "change":
            assert isinstance(detail, int)
            node.change(detail)
        elif what == "step":
            step(planner, node, master, str(detail))
        elif detail == "kill":
            master = ModelMaster()
            planner.detach()
            planner.attach(want_full_report=True, reason="new master")
        else:
            planner.request_full("asked")
    settle(planner, node, master)
    assert master.keys == node.keys
    assert master.acked == node.seq
    assert planner.acked_seq == node.seq


def test_nothing_is_sent_without_a_master() -> None:
    planner = ReportPlanner()
    assert isinstance(planner.next_step(), Idle)
    planner.attach(want_full_report=False)
    assert isinstance(planner.next_step(), TakeBase), "the first contact reports in full, asked or not"
    planner.base_taken(7)
    planner.detach()
    assert isinstance(planner.next_step(), Idle)


def test_events_up_to_the_base_are_not_sent_again() -> None:
    planner = ReportPlanner()
    planner.attach(want_full_report=True)
    planner.next_step()
    planner.base_taken(5)
    planner.acknowledged(0, need_full=False)  # begin
    planner.page_taken(0, b"")
    planner.acknowledged(5, need_full=False)  # end
    records = b"".join(record(1, key) for key in range(4, 8))
    planner.drained(4, 7, False, records)
    sent = planner.next_step()
    assert isinstance(sent, SendReport)
    assert (sent.report.first_seq, sent.report.last_seq) == (6, 7)
    assert sent.report.records == records[2 * RECORD_BYTES :]


@pytest.mark.parametrize(
    ("batch", "reason"),
    [
        ((9, 9, False, record(1, 1)), "gap in the event log"),
        ((1, 1, True, record(1, 1)), "event log overflow"),
        ((1, 3, False, record(1, 1)), "event batch does not match its sequence numbers"),
    ],
)
def test_a_doubtful_log_leads_to_a_full_report(batch: tuple[int, int, bool, bytes], reason: str) -> None:
    planner = ReportPlanner()
    planner.attach(want_full_report=True)
    planner.base_taken(0)
    planner.acknowledged(0, need_full=False)
    planner.page_taken(0, b"")
    planner.acknowledged(0, need_full=False)
    planner.drained(*batch)
    assert planner.reporting_full
    assert planner.last_full_reason == reason


def test_backoff_doubles_to_its_cap_and_stays_inside_its_jitter() -> None:
    backoff = Backoff(random.Random(4), first_s=0.1, cap_s=1.0)
    waits = [backoff.next_s() for _ in range(8)]
    for wait, step_s in zip(waits, [0.1, 0.2, 0.4, 0.8, 1.0, 1.0, 1.0, 1.0], strict=True):
        assert step_s / 2 <= wait <= step_s
    backoff.reset()
    assert backoff.next_s() <= 0.1
