"""A spare copy goes when it was not read for a while: what the node remembers of it, and how it asks the master."""

from __future__ import annotations

import random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mooncache.errors import OK, AlreadyExists, MasterUnavailable, NotFound, Pinned
from mooncache.proto.v1 import common_pb2, master_pb2, store_node_pb2
from mooncache.runtime.rpc import CallContext
from mooncache.store_node.background import release_spares
from mooncache.store_node.core import spare_copies
from mooncache.store_node.core.spare_copies import SpareCopies
from mooncache.store_node.identity import NodeIdentity
from mooncache.store_node.ops import copy_blocks
from mooncache.store_node.state import StoreNodeState
from tests.store_node.test_duties import FakeCore, FastClock

A, B, C = (bytes([number]) * 32 for number in range(3))
CONTEXT = CallContext(tenant="default", admin=True, request_id="r", deadline_s=1e9, now_s=0.0)


def test_a_copy_is_due_when_it_was_not_read_for_as_long() -> None:
    spares = SpareCopies(idle_s=10.0)
    spares.made("t", [A, B], 0.0)
    assert spares.looked("t", [A, B], [0, 0], 9.0) == []
    assert spares.looked("t", [A, B], [1, 0], 10.0) == [B], "A was read meanwhile"
    assert spares.looked("t", [A, B], [1, 0], 19.0) == [B], "it is due until the master has let it go"
    assert spares.looked("t", [A], [1], 20.0) == [A]
    spares.check()


def test_what_is_gone_or_an_only_copy_is_forgotten() -> None:
    spares = SpareCopies(idle_s=1.0)
    spares.made("t", [A, B], 0.0)
    spares.made("u", [A], 0.0)
    assert spares.looked("t", [A, C], [None, 5], 5.0) == [], "C is no spare copy"
    assert (spares.keys("t"), len(spares)) == ([B], 2)
    spares.forget("t", B)
    spares.forget("t", B)
    assert spares.tenants() == ["u"]
    spares.check()


def test_no_more_are_remembered_than_there_is_room_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spare_copies, "KNOWN_MAX", 2)
    spares = SpareCopies()
    spares.made("t", [A, B, C], 0.0)
    assert spares.keys("t") == [A, B]
    spares.made("t", [A], 5.0)
    spares.check()


@given(
    st.lists(st.tuples(st.sampled_from("mlf"), st.sampled_from("tu"), st.integers(0, 5), st.integers(0, 3)))
)
def test_the_count_is_right_whatever_happens(moves: list[tuple[str, str, int, int]]) -> None:
    spares, now_s = SpareCopies(idle_s=2.0), 0.0
    for move, tenant, number, reads in moves:
        now_s += 1.0
        key = bytes([number]) * 32
        if move == "m":
            spares.made(tenant, [key], now_s)
        elif move == "l":
            spares.looked(tenant, [key], [reads or None], now_s)
        else:
            spares.forget(tenant, key)
        spares.check()


class FakePeers:
    """The blocks here with their reads, and a master that lets go of what has another copy."""

    def __init__(self) -> None:
        self.reads_of: dict[bytes, int] = {}
        self.elsewhere: set[bytes] = set()
        self.pinned: set[bytes] = set()
        self.unreported: set[bytes] = set()
        self.asked: list[master_pb2.TrimBlocksRequest] = []
        self.away = False

    async def copy(
        self, tenant: str, keys: bytes, source: Any, timeout_s: float, bytes_per_s: int
    ) -> tuple[list[int], int]:
        found = [keys[at : at + 32] for at in range(0, len(keys), 32)]
        codes = [AlreadyExists.code if key in self.reads_of else OK for key in found]
        for key in found:
            self.reads_of.setdefault(key, 0)
        return codes, 5

    async def reads(self, tenant: str, keys: bytes, timeout_s: float) -> list[int | None]:
        return [self.reads_of.get(keys[at : at + 32]) for at in range(0, len(keys), 32)]

    async def call(self, method: str, request: Any, response_class: Any, timeout_s: float) -> Any:
        assert method == "TrimBlocks"
        if self.away:
            raise MasterUnavailable("away")
        self.asked.append(request)
        codes, dropped = [], 0
        for at in range(0, len(request.keys), 32):
            key = request.keys[at : at + 32]
            known = NotFound.code if key in self.unreported else OK
            codes.append(Pinned.code if key in self.pinned else known)
            if key in self.elsewhere and not codes[-1]:
                del self.reads_of[key]
                dropped += 1
        return master_pb2.TrimBlocksResponse(codes=codes, dropped_count=dropped)


def _node(peers: FakePeers) -> StoreNodeState:
    state = StoreNodeState(
        identity=NodeIdentity("n1", "h1", 99, "0", 0),
        core=FakeCore(),
        endpoints=common_pb2.Endpoints(),
        segments=[],
        clock=FastClock(),
        rng=random.Random(1),
        link=peers,  # type: ignore[arg-type]
        copier=peers,
        spares=SpareCopies(idle_s=10.0),
    )
    state.membership.registered = True
    return state


async def _copied(state: StoreNodeState, *keys: bytes, spare: bool) -> None:
    source = common_pb2.NodeInfo(node_id="n2")
    request = store_node_pb2.CopyBlocksRequest(
        tenant="default", keys=b"".join(keys), source=source, spare=spare
    )
    await copy_blocks.handle(state, request, CONTEXT)


async def test_idle_copies_go_pins_and_last_copies_stay() -> None:
    peers = FakePeers()
    state = _node(peers)
    own = b"\x07" * 32
    peers.reads_of[own] = 0  # a block that was put here
    await _copied(state, A, B, C, own, spare=True)
    await _copied(state, b"\x08" * 32, spare=False)
    assert state.spares.keys("default") == [A, B, C], "only what was copied to relieve others"
    peers.elsewhere, peers.pinned = {A, B}, {B}
    await release_spares.run_once(state)
    assert not peers.asked
    await state.clock.sleep(11.0)
    await release_spares.run_once(state)
    (asked,) = peers.asked
    assert (asked.keys, asked.replica_count, asked.node_id, asked.tenant) == (A + B + C, 1, "n1", "default")
    assert A not in peers.reads_of
    assert C in peers.reads_of, "the last copy"
    assert state.spares.keys("default") == [B], "a pin ends; the last copy is spare no longer"
    assert state.counters["spares_released"] == 1
    peers.pinned = set()
    await release_spares.run_once(state)
    assert B not in peers.reads_of
    assert not len(state.spares)


async def test_a_copy_that_the_master_has_not_heard_of_is_asked_for_again() -> None:
    peers = FakePeers()
    state = _node(peers)
    await _copied(state, A, spare=True)
    await state.clock.sleep(11.0)
    peers.elsewhere, peers.unreported = {A}, {A}
    await release_spares.run_once(state)
    assert state.spares.keys("default") == [A]
    peers.unreported = set()
    await release_spares.run_once(state)
    assert A not in peers.reads_of
    assert not len(state.spares)


async def test_nothing_is_asked_while_the_master_is_away_or_the_node_drains() -> None:
    peers = FakePeers()
    state = _node(peers)
    await _copied(state, A, spare=True)
    await state.clock.sleep(11.0)
    peers.away = True
    with pytest.raises(MasterUnavailable):
        await release_spares.run_once(state)
    peers.away, state.membership.registered = False, False
    await release_spares.run_once(state)
    state.membership.registered, state.draining = True, True
    await release_spares.run_once(state)
    assert not peers.asked
    assert state.spares.keys("default") == [A]
