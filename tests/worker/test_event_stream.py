"""Numbers of batches: order, gaps, replay, loss, another publisher."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from mooncache.worker.core.endpoints import reachable, subscriber
from mooncache.worker.core.event_stream import END_OF_REPLAY, EventAction, EventStream, sequence_of


def test_in_order() -> None:
    stream = EventStream()
    assert [stream.offer(number) for number in range(5)] == [EventAction.APPLY] * 5
    assert (stream.seen, stream.lost, stream.replayed) == (5, 0, 0)


def test_a_gap_that_a_replay_fills() -> None:
    stream = EventStream()
    stream.offer(0)
    assert stream.offer(3) == EventAction.REPLAY
    assert stream.replay([1, 2, 3]) == [1, 2, 3]
    assert not stream.after_replay(3)
    assert stream.offer(4) == EventAction.APPLY
    assert (stream.seen, stream.lost, stream.replayed) == (5, 0, 3)


def test_a_replay_that_ran_ahead_of_the_live_batches() -> None:
    stream = EventStream()
    stream.replay(range(10))
    assert [stream.offer(number) for number in (7, 8, 9, 10)] == [
        EventAction.OLD,
        EventAction.OLD,
        EventAction.OLD,
        EventAction.APPLY,
    ]


def test_a_gap_that_nobody_can_fill() -> None:
    stream = EventStream()
    stream.offer(0)
    assert stream.offer(10) == EventAction.REPLAY
    assert stream.replay([8, 9]) == [8, 9]
    assert stream.after_replay(10)
    assert (stream.lost, stream.expected) == (7, 11)


def test_another_publisher() -> None:
    stream = EventStream()
    stream.offer(0)
    stream.offer(1)
    assert stream.offer(0) == EventAction.RESTARTED
    stream.restart()
    assert stream.offer(0) == EventAction.APPLY
    assert stream.seen == 3


@given(st.lists(st.integers(0, 30), max_size=40, unique=True).map(sorted), st.integers(0, 30))
def test_every_batch_is_applied_once_or_lost(live: list[int], oldest: int) -> None:
    """Whatever is swallowed and whatever the replay has kept: each is applied once, in order, or lost."""
    stream = EventStream()
    applied: list[int] = []
    for number in live:
        verdict = stream.offer(number)
        if verdict == EventAction.REPLAY:
            applied += stream.replay(range(max(oldest, stream.expected), number + 1))
            verdict = EventAction.APPLY if stream.after_replay(number) else EventAction.OLD
        if verdict == EventAction.APPLY:
            applied.append(number)
    assert applied == sorted(set(applied))
    assert len(applied) + stream.lost == (live[-1] + 1 if live else 0)
    assert stream.seen == len(applied)


def test_frames() -> None:
    assert sequence_of((5).to_bytes(8, "big")) == 5
    assert sequence_of((-1).to_bytes(8, "big", signed=True)) == END_OF_REPLAY
    assert sequence_of(b"short") is None


def test_who_binds() -> None:
    assert subscriber("ipc:///run/x.ipc", "h") == (False, "ipc:///run/x.ipc")
    assert subscriber("tcp://*:5557", "127.0.0.1") == (False, "tcp://127.0.0.1:5557")
    assert subscriber("tcp://127.0.0.1:5557", "127.0.0.1") == (True, "tcp://127.0.0.1:5557")
    assert reachable("tcp://0.0.0.0:1", "h") == "tcp://h:1"
