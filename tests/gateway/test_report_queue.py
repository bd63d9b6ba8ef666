"""Reports wait in order until they are acknowledged; what is too much is dropped, ends last, and counted."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mooncache.gateway.core.report_queue import (
    AGAIN_FIRST_S,
    AGAIN_MAX_S,
    BATCH_BYTES_MAX,
    BATCH_COUNT_MAX,
    LINGER_S,
    Loss,
    ReportQueue,
    WaitingReport,
)


def report(name: str, *, is_end: bool = True, size_bytes: int = 100) -> WaitingReport[str]:
    return WaitingReport(name, f"d-{name}", f"r-{name}", is_end, size_bytes, 0.0)


def queue_of(
    *reports: WaitingReport[str], count_max: int = 4096, bytes_max: int = 1 << 20
) -> ReportQueue[str]:
    queue = ReportQueue[str](random.Random(1), count_max=count_max, bytes_max=bytes_max)
    for each in reports:
        queue.add(each)
    return queue


def names(queue: ReportQueue[str]) -> list[str]:
    return [waiting.report for waiting in queue.batch()]


def test_a_batch_stays_until_it_is_acknowledged() -> None:
    queue = queue_of(report("a"), report("b"))
    assert names(queue) == ["a", "b"]
    queue.failed()
    queue.add(report("c"))
    assert names(queue) == ["a", "b", "c"], "in the same order, with what came meanwhile"
    queue.add(report("d"))
    queue.acknowledged()
    assert names(queue) == ["d"], "that was not in the batch"
    queue.acknowledged()
    assert names(queue) == [] and len(queue) == queue.size_bytes == 0


def test_batches_are_bounded_in_number_and_in_bytes() -> None:
    many = queue_of(*(report(str(n)) for n in range(BATCH_COUNT_MAX + 5)))
    assert len(many.batch()) == BATCH_COUNT_MAX
    large = queue_of(*(report(str(n), size_bytes=BATCH_BYTES_MAX) for n in range(4)), bytes_max=1 << 30)
    assert len(large.batch()) == 2


def test_waits_grow_are_bounded_and_differ() -> None:
    queue, other = queue_of(report("a")), ReportQueue[str](random.Random(2))
    waits = [queue.failed() for _ in range(12)]
    assert AGAIN_FIRST_S / 2 <= waits[0] <= AGAIN_FIRST_S
    assert all(AGAIN_MAX_S / 2 <= wait_s <= AGAIN_MAX_S for wait_s in waits[6:])
    assert waits != [other.failed() for _ in range(12)], "two gateways do not come back together"
    queue.batch()
    queue.acknowledged()
    assert queue.failed() <= AGAIN_FIRST_S, "after a success it begins again"


def test_what_tells_of_no_end_is_dropped_first() -> None:
    queue = queue_of(report("a", is_end=False), report("b"), report("c", is_end=False), count_max=3)
    assert queue.add(report("d")) == Loss(2, is_first=True)
    assert names(queue) == ["b", "d"]


def test_the_oldest_end_is_dropped_when_there_are_ends_alone() -> None:
    queue = queue_of(report("a"), report("b"), count_max=2)
    assert queue.add(report("c")) == Loss(1, is_first=True)
    assert queue.add(report("d")) == Loss(1, is_first=False), "it is said once"
    assert queue.add(report("e", is_end=False)) == Loss(1, is_first=False), "no end goes for it"
    assert names(queue) == ["c", "d"]
    queue.acknowledged()
    queue.add(report("f"))
    queue.add(report("g"))
    assert queue.add(report("h")).is_first, "all was sent meanwhile, so this is a new trouble"


def test_a_batch_under_way_is_not_dropped_from() -> None:
    queue = queue_of(report("a", is_end=False), report("b"), count_max=2)
    assert names(queue) == ["a", "b"]
    queue.add(report("c"))
    queue.acknowledged()  # of the two
    assert names(queue) == [], "the new one had to go"


def test_a_report_that_is_refused_is_found_and_dropped_alone() -> None:
    queue = queue_of(*(report(str(n)) for n in range(10)))
    taken: list[str] = []
    dropped = 0
    while sent := names(queue):
        if "7" in sent:
            dropped += queue.refused().count
        else:
            taken += sent
            queue.acknowledged()
    assert dropped == 1
    assert taken == [str(n) for n in range(10) if n != 7]


def test_ends_wait_a_moment_for_what_goes_with_them() -> None:
    def lingering(name: str, made_s: float) -> WaitingReport[str]:
        return replace(report(name), made_s=made_s, lingers=True)

    queue = queue_of()
    assert queue.due_in_s(1.0) is None
    queue.add(lingering("a", 1.0))
    queue.add(lingering("b", 1.5))
    assert queue.due_in_s(1.0) == pytest.approx(LINGER_S), "the oldest one counts"
    assert queue.due_in_s(1.0 + LINGER_S) == 0.0
    queue.add(report("c", is_end=False))
    assert queue.due_in_s(1.0) == 0.0
    queue.check()
    assert names(queue) == ["a", "b", "c"], "in one batch"
    queue.acknowledged()
    queue.check()
    many = queue_of(*(lingering(str(n), 1.0) for n in range(BATCH_COUNT_MAX)))
    assert many.due_in_s(1.0) == 0.0, "a full batch waits for nothing"


def test_ends_that_wait_are_known() -> None:
    queue = queue_of(report("a"), report("b", is_end=False), report("c"))
    queue.batch()
    assert list(queue.open_ends()) == ["d-a", "d-c"], "those under way, too"
    queue.acknowledged()
    assert not list(queue.open_ends())


STEP = st.one_of(
    st.tuples(st.just("add"), st.booleans(), st.integers(1, 400)),
    st.tuples(st.sampled_from(["sent", "failed", "refused"]), st.booleans(), st.integers(0, 0)),
)


@settings(max_examples=200, deadline=None)
@given(st.lists(STEP, max_size=60))
def test_none_is_lost_without_being_counted_and_limits_hold(steps: list[tuple[str, bool, int]]) -> None:
    queue = ReportQueue[str](random.Random(0), count_max=8, bytes_max=1500)
    added = taken = dropped = 0
    for what, is_end, size_bytes in steps:
        if what == "add":
            added += 1
            dropped += queue.add(report(str(added), is_end=is_end, size_bytes=size_bytes)).count
        elif batch := queue.batch():
            assert [int(one.report) for one in batch] == sorted(int(one.report) for one in batch)
            if what == "sent":
                taken += len(batch)
                queue.acknowledged()
            elif what == "failed":
                queue.failed()
            else:
                dropped += queue.refused().count
        queue.check()
        assert len(queue) <= 8 and queue.size_bytes <= 1500
        assert added == taken + dropped + len(queue)
