"""Membership: states, incarnations, indices and epochs under random events, and the rules one by one."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mooncache import errors
from mooncache.master.core.membership import (
    TERM_SHIFT,
    Endpoints,
    Heartbeat,
    Membership,
    NodeState,
    Rail,
    Registration,
    Segment,
    SpaceUsage,
)
from tests.master.rules import membership_rules, placement_rules

GIB = 1 << 30
RULES = membership_rules(suspect_after_s=3.0, dead_after_s=10.0, forget_after_s=100.0)


def make(term: int = 1) -> Membership:
    membership = Membership(RULES, placement_rules())
    membership.reset(term)
    return membership


def info(node_id: str = "a", incarnation: int = 1, host: str = "h") -> Registration:
    return Registration(node_id, incarnation, host, Endpoints(tcp_port=7), segments=(Segment(0, 1, GIB),))


def test_a_node_joins_becomes_active_suspect_dead_and_is_forgotten() -> None:
    membership = make()
    node, _ = membership.register(info(), 0.0)
    assert node.state is NodeState.JOINING
    assert node.weight > 0
    membership.set_complete(node, True, 0.0)
    assert node.state is NodeState.ACTIVE
    assert not membership.expire(2.9)
    assert [t.after for t in membership.expire(3.0)] == [NodeState.SUSPECT]
    assert node.weight == 0.0
    membership.heartbeat(Heartbeat("a", 1, SpaceUsage(GIB)), 4.0)
    assert node.state is NodeState.ACTIVE
    (died,) = membership.expire(14.0)
    assert died.contents_lost
    with pytest.raises(errors.UnknownNode):
        membership.heartbeat(Heartbeat("a", 1, SpaceUsage(GIB)), 15.0)
    assert [t.after for t in membership.expire(104.0)] == [None]
    assert not membership.nodes


def test_a_rail_that_changes_its_state_makes_a_new_map_and_one_that_counts_does_not() -> None:
    membership = make()
    node, _ = membership.register(info(), 0.0)
    membership.note_rails(node, (Rail("mlx5_0", 1),))
    epoch = membership.epoch
    membership.note_rails(node, (Rail("mlx5_0", 1, connections=3, granted_bytes=9),))
    assert membership.epoch == epoch and node.rails[0].granted_bytes == 9
    membership.note_rails(node, (Rail("mlx5_0", 1, up=False),))
    assert membership.epoch == epoch + 1
    membership.note_rails(node, ())
    assert membership.epoch == epoch + 2


def test_every_visible_change_grows_the_epoch_and_repeats_do_not() -> None:
    membership = make()
    epochs = [membership.epoch]

    def grew() -> bool:
        epochs.append(membership.epoch)
        return epochs[-1] > epochs[-2]

    node, _ = membership.register(info(), 0.0)
    assert grew()
    membership.register(info(), 0.1)
    assert not grew()
    membership.set_complete(node, True, 0.1)
    assert grew()
    membership.set_drain("a", True, 0.2)
    assert grew()
    assert node.weight == 0.0
    membership.set_drain("a", True, 0.3)
    assert not grew()
    membership.set_drain("a", False, 0.4)
    assert grew()
    assert node.state is NodeState.ACTIVE


def test_a_new_incarnation_loses_contents_and_the_replaced_one_is_refused() -> None:
    membership = make()
    first, _ = membership.register(info(incarnation=50), 0.0)
    node, (restarted,) = membership.register(info(incarnation=20), 1.0)
    assert restarted.contents_lost
    assert node.index == first.index
    for call in (membership.fence, lambda *a: membership.register(info(incarnation=50), 1.5)):
        with pytest.raises(errors.StaleIncarnation):
            call("a", 50, 1.5)
    with pytest.raises(errors.UnknownNode):
        membership.fence("a", 77, 1.5)


def test_a_registration_that_was_late_for_too_long_does_not_lock_the_true_node_out() -> None:
    membership = make()
    membership.register(info(incarnation=2), 0.0)
    membership.register(info(incarnation=1), 1.0)  # of a process that is long gone
    with pytest.raises(errors.StaleIncarnation):
        membership.heartbeat(Heartbeat("a", 2, SpaceUsage(GIB)), 2.0)
    with pytest.raises(errors.UnknownNode):
        membership.heartbeat(Heartbeat("a", 2, SpaceUsage(GIB)), 4.5)
    node, _ = membership.register(info(incarnation=2), 4.5)
    assert node.incarnation == 2


def test_indices_are_dense_stable_and_used_again_only_after_forgetting() -> None:
    membership = make()
    assert [membership.register(info(name), 0.0)[0].index for name in "abc"] == [0, 1, 2]
    membership.heartbeat(Heartbeat("a", 1, SpaceUsage(GIB)), 120.0)
    membership.heartbeat(Heartbeat("c", 1, SpaceUsage(GIB)), 120.0)
    membership.expire(120.0)
    assert membership.register(info("d"), 120.0)[0].index == 3
    membership.expire(121.0)
    membership.heartbeat(Heartbeat("a", 1, SpaceUsage(GIB)), 121.0)
    membership.heartbeat(Heartbeat("c", 1, SpaceUsage(GIB)), 121.0)
    membership.heartbeat(Heartbeat("d", 1, SpaceUsage(GIB)), 121.0)
    membership.expire(121.0)
    assert "b" not in membership.nodes
    assert membership.register(info("e"), 121.0)[0].index == 1


def test_the_cluster_has_an_upper_size() -> None:
    membership = Membership(membership_rules(nodes_max=1), placement_rules())
    membership.register(info("a"), 0.0)
    with pytest.raises(errors.LimitExceeded):
        membership.register(info("b"), 0.0)


def test_free_bytes_are_published_together_and_only_when_they_moved_enough() -> None:
    membership = make()
    for name in "ab":
        node, _ = membership.register(info(name), 0.0)
        membership.set_complete(node, True, 0.0)
    membership.refresh(50.0)
    epoch = membership.epoch
    membership.heartbeat(Heartbeat("a", 1, SpaceUsage(GIB, used_bytes=GIB // 1000)), 51.5)
    assert not membership.refresh(51.5)
    for name in "ab":
        membership.heartbeat(Heartbeat(name, 1, SpaceUsage(GIB, used_bytes=GIB // 2)), 52.0)
    assert membership.refresh(52.0)
    assert membership.epoch == epoch + 1
    membership.heartbeat(Heartbeat("a", 1, SpaceUsage(GIB)), 52.5)
    assert not membership.refresh(52.5)
    assert membership.refresh(53.5)


def test_a_nodes_own_drain_is_adopted_but_a_late_heartbeat_is_not() -> None:
    membership = make()
    node, _ = membership.register(info(), 0.0)
    membership.note_own_drain(node, True, 1.0)
    membership.note_own_drain(node, False, 1.1)
    assert not node.drain_wanted
    membership.note_own_drain(node, True, 2.0)
    membership.note_own_drain(node, True, 3.0)
    assert node.state is NodeState.DRAINING
    membership.set_drain("a", False, 4.0)
    membership.note_own_drain(node, True, 4.1)  # has not heard of it yet
    membership.note_own_drain(node, True, 4.2)
    assert node.state is NodeState.JOINING
    membership.note_own_drain(node, False, 5.0)
    assert not node.undrain_pending


def test_a_node_whose_arena_is_gone_is_drained_until_it_is_back() -> None:
    membership = make()
    node, _ = membership.register(info(), 0.0)
    membership.set_complete(node, True, 0.0)
    epoch = membership.epoch
    (left,) = membership.note_arena(node, True, 1.0)
    assert (left.before, left.after) == (NodeState.ACTIVE, NodeState.DRAINING)
    assert node.weight == 0.0
    assert membership.epoch > epoch
    assert membership.note_arena(node, True, 1.5) == []
    (back,) = membership.note_arena(node, False, 2.0)
    assert back.after is NodeState.ACTIVE
    assert node.weight > 0


def test_an_arena_that_is_gone_and_a_drain_are_two_reasons() -> None:
    membership = make()
    node, _ = membership.register(info(), 0.0)
    membership.set_drain("a", True, 1.0)
    assert membership.note_arena(node, True, 2.0) == []
    membership.set_drain("a", False, 3.0)
    assert node.state is NodeState.DRAINING
    membership.expire(6.0)
    assert node.state is NodeState.SUSPECT
    membership.note_arena(node, False, 6.0)
    membership.note_arena(node, True, 6.1)
    assert node.state is NodeState.SUSPECT
    membership.heartbeat(Heartbeat("a", 1, SpaceUsage(GIB), arena_gone=True), 7.0)
    assert node.state is NodeState.DRAINING
    membership.register(info(incarnation=2), 8.0)
    assert node.state is NodeState.JOINING, "its memory is another one"


def test_a_later_terms_epochs_are_larger() -> None:
    membership = make(3)
    last = membership.epoch + 1000
    membership.reset(4)
    assert membership.epoch > last
    assert membership.epoch >> TERM_SHIFT == 4


@settings(max_examples=150, deadline=None)
@given(st.integers(0, 2**32))
def test_invariants_hold_under_random_events(seed: int) -> None:
    rng = random.Random(seed)
    membership = make()
    now_s, epoch = 0.0, membership.epoch
    for _ in range(120):
        now_s += rng.choice([0.1, 1.0, 4.0, 12.0, 60.0])
        name = rng.choice("abcdef")
        before = {n.node_id: (n.state, n.weight, n.incarnation) for n in membership.nodes.values()}
        try:
            match rng.randrange(7):
                case 0 | 1:
                    membership.register(info(name, rng.randrange(3), rng.choice("gh")), now_s)
                case 2 | 3:
                    usage = SpaceUsage(GIB, rng.randrange(GIB))
                    beat = Heartbeat(
                        name,
                        rng.randrange(3),
                        usage,
                        draining=rng.random() < 0.3,
                        arena_gone=rng.random() < 0.3,
                    )
                    membership.heartbeat(beat, now_s)
                case 4:
                    membership.set_drain(name, rng.random() < 0.5, now_s)
                case 5:
                    membership.set_complete(
                        membership.fence(name, rng.randrange(3), now_s), rng.random() < 0.7, now_s
                    )
                case 6:
                    membership.expire(now_s)
                    membership.refresh(now_s)
        except (errors.UnknownNode, errors.StaleIncarnation):
            pass
        membership.check()
        after = {n.node_id: (n.state, n.weight, n.incarnation) for n in membership.nodes.values()}
        joined = {k: v for k, v in after.items() if before.get(k) != v and v[0] is not NodeState.JOINING}
        assert membership.epoch >= epoch
        assert not joined or membership.epoch > epoch, f"seed {seed}: a visible change without a new epoch"
        epoch = membership.epoch
