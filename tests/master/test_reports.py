"""Reports.

Whatever the network does to them, a complete node's entries plus its later changes are its contents.
"""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mooncache import errors
from mooncache.master.core.reports import NodeReports, ReportCounters, ReportRules
from tests.master.model_index import ADD, REMOVE, ModelIndex, record

KEYS = [bytes([n]) * 32 for n in range(24)]


def make(rules: ReportRules | None = None) -> tuple[NodeReports, ModelIndex, ReportCounters]:
    index, counters = ModelIndex(), ReportCounters()
    return NodeReports(0, index, rules or ReportRules(), counters), index, counters


def full(reports: NodeReports, report_id: int, base_seq: int, keys: list[bytes]) -> None:
    reports.full_begin(report_id, base_seq, 0.0)
    reports.full_part(report_id, 0, b"".join(record(ADD, 1, key) for key in keys), 0.0)
    reports.full_end(report_id, 1, 0.0)


def held(index: ModelIndex) -> set[bytes]:
    return {key for _, key in index.blocks.get(0, {})}


def test_deltas_before_any_full_report_ask_for_one() -> None:
    reports, index, _ = make()
    assert reports.delta(1, 1, record(ADD, 1, KEYS[0]), 0.0).need_full
    assert not held(index)


def test_contiguous_deltas_are_applied_and_repeats_ignored() -> None:
    reports, index, counters = make()
    full(reports, 7, 0, [])
    ack = reports.delta(1, 2, record(ADD, 1, KEYS[0]) + record(ADD, 1, KEYS[1]), 0.0)
    assert (ack.acked_seq, ack.need_full) == (2, False)
    assert reports.delta(1, 2, record(ADD, 1, KEYS[0]) + record(ADD, 1, KEYS[1]), 0.0).acked_seq == 2
    assert counters.repeats == 1
    overlap = record(ADD, 1, KEYS[1]) + record(REMOVE, 1, KEYS[0])
    assert reports.delta(2, 3, overlap, 0.0).acked_seq == 3
    assert held(index) == {KEYS[1]}


def test_a_gap_ends_completeness_and_a_full_report_restores_it() -> None:
    reports, index, counters = make()
    full(reports, 7, 0, [KEYS[0]])
    assert reports.delta(5, 5, record(ADD, 1, KEYS[5]), 0.0).need_full
    assert not reports.complete
    assert reports.want_full
    assert counters.gaps == 1
    full(reports, 8, 5, [KEYS[5]])
    assert reports.complete
    assert held(index) == {KEYS[5]}
    assert reports.acked_seq == 5


def test_parts_may_come_in_any_order_and_after_the_end() -> None:
    reports, index, _ = make()
    reports.full_begin(9, 4, 0.0)
    reports.full_part(9, 2, record(ADD, 1, KEYS[2]), 0.0)
    assert reports.full_end(9, 3, 0.0).next_part_index == 0
    reports.full_part(9, 0, record(ADD, 1, KEYS[0]), 0.0)
    reports.full_part(9, 0, record(ADD, 1, KEYS[0]), 0.0)
    assert not reports.complete
    reports.full_part(9, 1, record(ADD, 1, KEYS[1]), 0.0)
    assert reports.complete
    assert held(index) == set(KEYS[:3])


def test_deltas_during_a_full_report_are_applied_after_it() -> None:
    reports, index, _ = make()
    reports.full_begin(9, 4, 0.0)
    ack = reports.delta(5, 5, record(REMOVE, 1, KEYS[0]), 0.0)
    assert (ack.acked_seq, ack.need_full) == (5, False)
    reports.full_part(9, 0, record(ADD, 1, KEYS[0]) + record(ADD, 1, KEYS[1]), 0.0)
    reports.full_end(9, 1, 0.0)
    assert held(index) == {KEYS[1]}
    assert reports.acked_seq == 5


def test_too_many_waiting_deltas_give_the_full_report_up() -> None:
    reports, _, counters = make(ReportRules(buffered_bytes_max=100))
    reports.full_begin(9, 0, 0.0)
    assert not reports.delta(1, 1, record(ADD, 1, KEYS[0]), 0.0).need_full
    assert reports.delta(2, 2, record(ADD, 1, KEYS[1]), 0.0).need_full
    assert counters.overflows == 1
    assert reports.want_full


def test_late_messages_of_an_older_report_change_nothing() -> None:
    reports, index, _ = make()
    full(reports, 7, 3, [KEYS[0]])
    reports.delta(4, 4, record(REMOVE, 1, KEYS[0]), 0.0)
    reports.full_begin(7, 3, 0.0)
    reports.full_begin(6, 2, 0.0)
    reports.full_part(7, 0, record(ADD, 1, KEYS[0]), 0.0)
    ack = reports.full_end(7, 1, 0.0)
    assert (ack.acked_seq, ack.need_full) == (4, False)
    assert reports.complete
    assert not held(index)


def test_a_full_report_that_stops_coming_is_given_up() -> None:
    reports, _, _ = make(ReportRules(full_timeout_s=5.0))
    reports.full_begin(9, 0, 0.0)
    assert not reports.tick(4.0)
    assert reports.tick(5.0)
    assert reports.full_part(9, 0, b"", 5.0).need_full


def test_impossible_reports_are_refused() -> None:
    reports, _, _ = make(ReportRules(parts_max=4))
    with pytest.raises(errors.InvalidArgument):
        reports.delta(1, 1, b"x" * 55, 0.0)
    with pytest.raises(errors.InvalidArgument):
        reports.delta(0, 1, b"", 0.0)
    with pytest.raises(errors.InvalidArgument):
        reports.full_begin(0, 0, 0.0)
    reports.full_begin(1, 0, 0.0)
    with pytest.raises(errors.LimitExceeded):
        reports.full_part(1, 4, b"", 0.0)
    with pytest.raises(errors.InvalidArgument):
        reports.full_end(1, 5, 0.0)


class Source:
    """A node's contents and log.

    Sends fuzzy full reports and deltas through a network that keeps every message.
    """

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.held: dict[bytes, None] = {}
        self.log: list[bytes] = []
        self.next_report = 1

    def change(self) -> None:
        key = self.rng.choice(KEYS)
        if key in self.held:
            del self.held[key]
            self.log.append(record(REMOVE, 1, key))
        else:
            self.held[key] = None
            self.log.append(record(ADD, 1, key))


def replayed(entries: set[bytes], changes: list[bytes]) -> set[bytes]:
    for change in changes:
        (entries.discard if change[0] == REMOVE else entries.add)(change[-32:])
    return entries


@settings(max_examples=300, deadline=None)
@given(st.integers(0, 2**32))
def test_any_loss_repeat_and_reordering_keeps_complete_entries_exact(seed: int) -> None:
    rng = random.Random(seed)
    node = Source(rng)
    reports, index, _ = make(ReportRules(buffered_bytes_max=56 * 20))
    acked, sent = 0, []  # every message ever sent may come again

    def deliver(message: tuple[str, tuple[object, ...]]) -> object:
        answer = getattr(reports, message[0])(*message[1], 0.0)
        if reports.complete:
            assert replayed(held(index), node.log[reports.acked_seq :]) == set(node.held), f"seed {seed}"
        return answer

    for _ in range(60):
        for _ in range(rng.randrange(4)):
            node.change()
        dice = rng.random()
        if dice < 0.25 and sent:
            deliver(rng.choice(sent))
        elif dice < 0.5 or not reports.complete:
            report_id, base = node.next_report, len(node.log)
            node.next_report += 1
            script = [("full_begin", (report_id, base))]
            for part, key in enumerate(KEYS):
                if rng.random() < 0.3:
                    node.change()  # the picture is fuzzy: blocks change while it is taken
                script.append(
                    ("full_part", (report_id, part, record(ADD, 1, key) if key in node.held else b""))
                )
            script.append(("full_end", (report_id, len(KEYS))))
            head, tail = script[0], script[1:]
            rng.shuffle(tail)
            for message in [head, *tail]:
                sent.append(message)
                if rng.random() < 0.98:
                    acked = deliver(message).acked_seq
                if rng.random() < 0.1:
                    deliver(rng.choice(sent))
        else:
            last = len(node.log)
            if last > acked:
                message = ("delta", (acked + 1, last, b"".join(node.log[acked:last])))
                sent.append(message)
                if rng.random() < 0.9:
                    acked = deliver(message).acked_seq
    # Heal: one undisturbed full report must always be taken in.
    report_id = node.next_report
    deliver(("full_begin", (report_id, len(node.log))))
    deliver(("full_part", (report_id, 0, b"".join(record(ADD, 1, key) for key in node.held))))
    deliver(("full_end", (report_id, 1)))
    assert reports.complete, f"seed {seed}"
    assert held(index) == set(node.held), f"seed {seed}"
