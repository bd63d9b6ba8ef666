"""Which peers nodes are to try, and what is kept of it: all pairs of small clusters, bounded work in large ones."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mooncache.master.core.peer_latency import KEPT, PEERS_MAX, TRIAL_INTERVAL_S, PeerLatencies


def following(*names: str) -> PeerLatencies:
    found = PeerLatencies()
    found.follow(1, names)
    return found


def test_all_pairs_of_a_small_cluster_in_turn() -> None:
    ways = following("a", "b", "c", "d")
    for turn in range(6):
        now_s = turn * TRIAL_INTERVAL_S
        for name in "abcd":
            peer = ways.next_peer(name, now_s)
            assert ways.next_peer(name, now_s + TRIAL_INTERVAL_S / 2) == "", "not yet"
            assert ways.take(name, peer, 100 + turn, now_s + 0.1)
            ways.check()
    for name in "abcd":
        assert {way.node_id for way in ways.of(name, 20.0)} == set("abcd") - {name}
    first = ways.of("a", 10.1)[0]
    assert first[:-1] == ("b", 102, 100, 2, 0)
    assert first.age_s == pytest.approx(10.1 - 6.1)


def test_one_slow_answer_is_no_distance_and_failures_are_counted_in_a_row() -> None:
    ways = following("a", "b")
    took = [100, 100, 90_000, 110, 0, 0]
    for turn, took_us in enumerate(took):
        assert ways.next_peer("a", turn * TRIAL_INTERVAL_S) == "b"
        assert ways.take("a", "b", took_us, turn * TRIAL_INTERVAL_S)
    (way,) = ways.of("a", 10.0)
    assert (way.median_us, way.least_us, way.tries, way.failures) == (105, 100, 4, 2)
    for turn in range(6, 6 + KEPT):
        ways.next_peer("a", turn * TRIAL_INTERVAL_S)
        ways.take("a", "b", 7, turn * TRIAL_INTERVAL_S)
    (way,) = ways.of("a", 99.0)
    assert (way.median_us, way.least_us, way.tries, way.failures) == (7, 7, KEPT, 0)


def test_what_was_not_asked_for_is_not_kept() -> None:
    ways = following("a", "b", "c")
    assert not ways.take("a", "b", 5, 0.0)
    assert ways.next_peer("a", 0.0) == "b"
    assert not ways.take("a", "c", 5, 0.0)
    assert not ways.take("x", "b", 5, 0.0)
    assert ways.take("a", "b", 5, 0.0)
    assert not ways.take("a", "b", 5, 0.0), "once"
    assert following("a").next_peer("a", 0.0) == ""
    assert ways.next_peer("x", 0.0) == ""


def test_large_clusters_cost_each_node_as_much_as_small_ones() -> None:
    names = [f"n-{number}" for number in range(3 * PEERS_MAX)]
    ways = following(*names)
    for turn in range(2 * PEERS_MAX):
        peer = ways.next_peer(names[-1], turn * TRIAL_INTERVAL_S)
        assert ways.take(names[-1], peer, 5, turn * TRIAL_INTERVAL_S)
    assert [way.node_id for way in ways.of(names[-1], 0.0)] == names[:PEERS_MAX], "the ring closes"
    ways.follow(2, names[1:])
    ways.check()
    assert names[0] not in {way.node_id for way in ways.of(names[-1], 0.0)}
    ways.follow(3, names[:-1])
    assert ways.of(names[-1], 0.0) == []


@given(st.data())
def test_nodes_come_and_go(data: st.DataObject) -> None:
    ways, now_s = PeerLatencies(), 0.0
    asked: dict[str, str] = {}
    for epoch in range(data.draw(st.integers(1, 12))):
        living = data.draw(st.lists(st.sampled_from("abcdefgh"), unique=True))
        ways.follow(epoch, living)
        ways.check()
        for name in data.draw(st.lists(st.sampled_from("abcdefgh"), max_size=8)):
            now_s += data.draw(st.sampled_from([0.1, TRIAL_INTERVAL_S]))
            ways.take(name, asked.get(name, ""), data.draw(st.integers(0, 9)), now_s)
            asked[name] = ways.next_peer(name, now_s)
            ways.check()
            assert not asked[name] or {name, asked[name]} <= set(living)
            assert {way.node_id for way in ways.of(name, now_s)} <= set(living) - {name}
