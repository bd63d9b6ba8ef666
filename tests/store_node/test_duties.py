"""Registration, heartbeats and reports of one node against a master that loses, forgets and fails over."""

from __future__ import annotations

import asyncio
import contextlib
import random
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import pytest

from mooncache.client.master_link import MasterLink
from mooncache.client.terms import PATIENCE_S
from mooncache.errors import (
    InvalidArgument,
    MasterUnavailable,
    NotLeader,
    StaleIncarnation,
    Unauthenticated,
    UnknownNode,
)
from mooncache.proto.v1 import common_pb2, master_pb2, store_node_pb2
from mooncache.runtime.rpc import CallContext
from mooncache.store_node.background import keep_membership, report_blocks
from mooncache.store_node.core.report_planner import RECORD_BYTES
from mooncache.store_node.identity import NodeIdentity
from mooncache.store_node.ops import (
    copy_blocks,
    drop_blocks,
    get_node_status,
    pin_blocks,
    set_draining,
    unpin_blocks,
)
from mooncache.store_node.state import StoreNodeState
from tests import conditions

# The clock of these tests moves with each turn of the event loop, so they look at each turn.
until = partial(conditions.until, every_s=0.0)


CONTEXT = CallContext(tenant="default", admin=True, request_id="r", deadline_s=10.0, now_s=0.0)
KEY = bytes(range(32))


class FastClock:
    """Time passes only in sleeps, which take no real time."""

    def __init__(self) -> None:
        self.time_s = 0.0

    def now_s(self) -> float:
        return self.time_s

    def wall_s(self) -> float:
        return self.time_s

    async def sleep(self, delay_s: float) -> None:
        self.time_s += max(0.0, delay_s)
        await asyncio.sleep(0)


def record(kind: int, key: int) -> bytes:
    return bytes([kind]) + bytes(23) + key.to_bytes(32, "little")


@dataclass
class FakeCore:
    """A node's memory with the interface of the native server."""

    keys: set[int] = field(default_factory=set)
    log: list[tuple[int, bytes]] = field(default_factory=list)
    seq: int = 0
    draining: bool = False
    arena_gone: bool = False
    removed: list[tuple[int, bytes, int]] = field(default_factory=list)

    def change(self, key: int) -> None:
        kind = 2 if key in self.keys else 1
        self.keys ^= {key}
        self.seq += 1
        self.log.append((self.seq, record(kind, key)))

    def stats(self) -> dict[str, int]:
        return {
            "store_capacity_bytes": 1000,
            "store_used_bytes": len(self.keys),
            "store_blocks": len(self.keys),
            "store_arena_gone": int(self.arena_gone),
        }

    def tenants(self) -> dict[int, str]:
        return {7: "default"}

    def rails(self) -> list[dict[str, Any]]:
        return [{"device": "mlx5_0", "port": 1, "up": True, "granted_bytes": 9, "failures": 2}]

    def event_seq(self) -> int:
        return self.seq

    def drain_events(self, max_events: int, /) -> tuple[int, int, bool, bytes]:
        batch, self.log = self.log[:max_events], self.log[max_events:]
        if not batch:
            return self.seq + 1, self.seq, False, b""
        return batch[0][0], batch[-1][0], False, b"".join(item for _, item in batch)

    def snapshot(self, cursor: int, max_records: int, /) -> tuple[int, bytes]:
        rest = sorted(key for key in self.keys if key >= cursor)
        page = rest[:max_records]
        return (page[-1] + 1 if len(rest) > max_records else 0), b"".join(record(1, key) for key in page)

    def set_draining(self, draining: bool, /) -> None:
        self.draining = draining

    def remove(self, tenant_id: int, keys: bytes, reason: int, /) -> list[int]:
        self.removed.append((tenant_id, keys, reason))
        return [0] * (len(keys) // 32)

    def pin(self, tenant_id: int, keys: bytes, ttl_ms: int, /) -> list[int]:
        return [0] * (len(keys) // 32)

    def unpin(self, tenant_id: int, keys: bytes, /) -> list[int]:
        return [206] * (len(keys) // 32)


@dataclass
class FakeMaster:
    """Just enough of a master: membership by name, a directory of one node, and faults on demand."""

    term: int = 1
    leading: bool = True
    up: bool = True
    known: bool = False
    keys: set[int] = field(default_factory=set)
    acked: int = 0
    building: set[int] = field(default_factory=set)
    base: int = 0
    commands: list[int] = field(default_factory=list)
    want_full: bool = False
    calls: list[str] = field(default_factory=list)
    heard: Any = None

    async def close(self) -> None:
        pass

    async def call(self, method: str, request: Any, _response_class: type, timeout_s: float) -> Any:
        assert timeout_s > 0
        self.calls.append(method)
        await asyncio.sleep(0)
        if not self.up:
            raise MasterUnavailable("nobody listens")
        if not self.leading:
            raise NotLeader("a standby")
        return getattr(self, f"_{method}")(request)

    def _RegisterNode(self, request: Any) -> Any:
        self.known = True
        return master_pb2.RegisterNodeResponse(
            master_id=f"m{self.term}",
            term=self.term,
            heartbeat_interval_ms=1000,
            lease_ms=5000,
            want_full_report=True,
        )

    def _Heartbeat(self, request: Any) -> Any:
        if not self.known:
            raise UnknownNode("register first")
        self.heard = request
        commands, self.commands = self.commands, []
        want_full, self.want_full = self.want_full, False
        return master_pb2.HeartbeatResponse(term=self.term, commands=commands, want_full_report=want_full)

    def _ReportBlocks(self, request: Any) -> Any:
        if not self.known:
            raise UnknownNode("register first")
        kind = request.kind
        if kind == master_pb2.REPORT_KIND_FULL_BEGIN:
            self.building, self.base = set(), request.first_seq
        elif kind == master_pb2.REPORT_KIND_FULL_PART:
            self._apply(self.building, request.records)
        elif kind == master_pb2.REPORT_KIND_FULL_END:
            self.keys, self.acked = self.building, self.base
        elif request.first_seq != self.acked + 1:
            return master_pb2.ReportBlocksResponse(acked_seq=self.acked, need_full=True)
        else:
            self._apply(self.keys, request.records)
            self.acked = request.last_seq
        return master_pb2.ReportBlocksResponse(acked_seq=self.acked)

    @staticmethod
    def _apply(keys: set[int], records: bytes) -> None:
        for start in range(0, len(records), RECORD_BYTES):
            key = int.from_bytes(records[start + 24 : start + 56], "little")
            (keys.add if records[start] == 1 else keys.discard)(key)


def make_state(masters: dict[str, FakeMaster], core: FakeCore | None = None) -> StoreNodeState:
    clock = FastClock()
    link = MasterLink(list(masters), lambda target: masters[target], clock, random.Random(1))
    return StoreNodeState(
        identity=NodeIdentity("n1", "h1", 99, "0", 0),
        core=core or FakeCore(),
        endpoints=common_pb2.Endpoints(tcp_host="127.0.0.1", tcp_port=1),
        segments=[],
        clock=clock,
        rng=random.Random(2),
        link=link,
    )


@contextlib.asynccontextmanager
async def duties(state: StoreNodeState) -> Any:
    tasks = [asyncio.create_task(keep_membership.run(state)), asyncio.create_task(report_blocks.run(state))]
    try:
        yield
        for task in tasks:
            assert not task.done(), task.exception()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def test_a_node_registers_and_its_blocks_reach_the_directory() -> None:
    master, core = FakeMaster(), FakeCore()
    for key in range(50):
        core.change(key)
    state = make_state({"a:1": master}, core)
    async with duties(state):
        await until(lambda: master.keys == core.keys)
        core.change(3)
        core.change(1000)
        await until(lambda: master.acked == core.seq)
    assert master.keys == core.keys
    assert state.membership.master_id == "m1"


async def test_a_new_empty_leader_is_found_and_told_everything() -> None:
    old, new, core = FakeMaster(), FakeMaster(term=2, leading=False), FakeCore()
    for key in range(20):
        core.change(key)
    state = make_state({"a:1": old, "b:1": new}, core)
    async with duties(state):
        await until(lambda: old.keys == core.keys)
        old.up, new.leading = False, True
        core.change(77)
        await until(lambda: new.keys == core.keys and new.acked == core.seq)
    assert state.membership.term == 2


async def test_a_restarted_master_with_the_same_address_is_told_everything() -> None:
    master, core = FakeMaster(), FakeCore()
    core.change(1)
    state = make_state({"a:1": master}, core)
    async with duties(state):
        await until(lambda: master.keys == core.keys)
        master.known, master.keys, master.acked, master.term = False, set(), 0, 2
        await until(lambda: master.keys == core.keys)
    assert state.planner.full_reports_finished >= 2


async def test_the_node_serves_without_a_master_and_asks_ever_less_often() -> None:
    master = FakeMaster(up=False)
    state = make_state({"a:1": master})
    async with duties(state):
        await until(lambda: state.clock.now_s() > 100)
    assert not state.membership.registered
    assert set(master.calls) == {"RegisterNode"}
    assert len(master.calls) < 150


async def test_wishes_of_the_master_are_carried_out() -> None:
    master, core = FakeMaster(), FakeCore()
    state = make_state({"a:1": master}, core)
    async with duties(state):
        await until(lambda: state.membership.registered)
        master.commands = [master_pb2.NODE_COMMAND_DRAIN_ON]
        await until(lambda: core.draining)
        master.commands = [master_pb2.NODE_COMMAND_DRAIN_OFF]
        await until(lambda: not core.draining)
        before = state.planner.full_reports_started
        master.want_full = True
        await until(lambda: state.planner.full_reports_started > before)


async def test_an_arena_that_is_gone_is_told_and_is_no_drain() -> None:
    master, core = FakeMaster(), FakeCore()
    state = make_state({"a:1": master}, core)
    async with duties(state):
        await until(lambda: master.heard is not None)
        assert not master.heard.arena_gone
        core.arena_gone = True
        await until(lambda: master.heard.arena_gone)
        assert master.heard.state == common_pb2.NODE_STATE_ACTIVE
        core.arena_gone = False
        await until(lambda: not master.heard.arena_gone)


async def test_refusals_do_not_end_the_duties() -> None:
    class Moody(FakeMaster):
        refusals = 0

        def _Heartbeat(self, request: Any) -> Any:
            self.refusals += 1
            if self.refusals == 1:
                raise StaleIncarnation("somebody else has this name")
            if self.refusals == 2:
                raise Unauthenticated("wrong token")
            return super()._Heartbeat(request)

    master = Moody()
    state = make_state({"a:1": master})
    async with duties(state):
        await until(lambda: master.refusals > 3)
    assert state.membership.registered


# --- control calls ----------------------------------------------------------------------------------------------


async def test_drop_carries_its_reason() -> None:
    state = make_state({"a:1": FakeMaster()})
    request = store_node_pb2.DropBlocksRequest(
        tenant_id=7, keys=KEY * 2, reason=store_node_pb2.DROP_REASON_DRAINED
    )
    response = await drop_blocks.handle(state, request, CONTEXT)
    assert list(response.codes) == [0, 0]
    assert isinstance(state.core, FakeCore)
    assert state.core.removed == [(7, KEY * 2, 4)]


async def test_pins_and_drains() -> None:
    state = make_state({"a:1": FakeMaster()})
    pinned = await pin_blocks.handle(
        state, store_node_pb2.NodePinBlocksRequest(tenant_id=7, keys=KEY, ttl_ms=5), CONTEXT
    )
    assert list(pinned.codes) == [0]
    unpinned = await unpin_blocks.handle(
        state, store_node_pb2.NodeUnpinBlocksRequest(tenant_id=7, keys=KEY), CONTEXT
    )
    assert list(unpinned.codes) == [206]
    drained = await set_draining.handle(state, store_node_pb2.SetDrainingRequest(draining=True), CONTEXT)
    assert drained.state == common_pb2.NODE_STATE_DRAINING
    status = await get_node_status.handle(state, store_node_pb2.GetNodeStatusRequest(), CONTEXT)
    assert status.node_id == "n1"
    assert status.state == common_pb2.NODE_STATE_DRAINING


@pytest.mark.parametrize("keys", [b"", b"short", KEY + b"x"])
async def test_malformed_keys_are_refused(keys: bytes) -> None:
    state = make_state({"a:1": FakeMaster()})
    with pytest.raises(InvalidArgument):
        await drop_blocks.handle(state, store_node_pb2.DropBlocksRequest(keys=keys), CONTEXT)
    with pytest.raises(InvalidArgument):
        await pin_blocks.handle(state, store_node_pb2.NodePinBlocksRequest(keys=keys, ttl_ms=1), CONTEXT)


async def test_copies_are_bounded_by_the_callers_deadline() -> None:
    seen: list[float] = []
    rates: list[int] = []

    class Copier:
        async def copy(
            self, tenant: str, keys: bytes, source: Any, timeout_s: float, bytes_per_s: int
        ) -> tuple[list[int], int]:
            seen.append(timeout_s)
            rates.append(bytes_per_s)
            return [0], 5

        async def reads(self, tenant: str, keys: bytes, timeout_s: float) -> list[int | None]:
            return [None]

    state = make_state({"a:1": FakeMaster()})
    state.copier = Copier()
    source = common_pb2.NodeInfo(node_id="n2")
    request = store_node_pb2.CopyBlocksRequest(tenant="default", keys=KEY, source=source, timeout_ms=60_000)
    response = await copy_blocks.handle(state, request, CONTEXT)
    assert response.copied_bytes == 5
    assert seen[0] < 10.0
    request.bytes_per_s = 7
    await copy_blocks.handle(state, request, CONTEXT)
    assert rates == [0, 7]
    request.source.node_id = "n1"
    with pytest.raises(InvalidArgument, match="itself"):
        await copy_blocks.handle(state, request, CONTEXT)


# --- terms ------------------------------------------------------------------------------------------------------


async def test_a_stale_leader_is_neither_obeyed_nor_registered_with() -> None:
    old, new, core = FakeMaster(term=5), FakeMaster(term=6, leading=False), FakeCore()
    state = make_state({"a:1": old, "b:1": new}, core)
    async with duties(state):
        await until(lambda: state.membership.term == 5)
        old.leading, new.leading = False, True
        await until(lambda: state.membership.term == 6)
        late = store_node_pb2.Fence(term=5, incarnation=99)
        for handle, request in commands(late):
            with pytest.raises(NotLeader, match="term 5"):
                await handle(state, request, CONTEXT)
        assert not core.removed
        assert not core.draining
        new.up, old.leading = False, True  # the stale one wakes up, and the new one cannot be reached
        await until(lambda: state.terms.refusals > 0)
        assert not state.membership.registered
        new.up = True
        await until(lambda: state.membership.registered)
        assert state.membership.term == 6


async def test_a_cluster_that_began_anew_with_an_older_term_gets_its_nodes_back() -> None:
    master, core = FakeMaster(term=9), FakeCore()
    core.change(1)
    state = make_state({"a:1": master}, core)
    async with duties(state):
        await until(lambda: master.keys == core.keys)
        master.term, master.known, master.keys, master.acked = 2, False, set(), 0
        begin_s = state.clock.now_s()
        await until(lambda: state.membership.term == 2 and master.keys == core.keys)
        assert state.clock.now_s() - begin_s >= PATIENCE_S
    fence = store_node_pb2.Fence(term=2, incarnation=99)
    assert len(commands(fence)) == 4
    for handle, request in commands(fence):
        await handle(state, request, CONTEXT)
    assert core.removed


async def test_a_command_for_another_life_or_another_node_is_refused() -> None:
    core = FakeCore()
    state = make_state({"a:1": FakeMaster()}, core)
    for handle, request in commands(store_node_pb2.Fence(term=1, incarnation=98)):
        with pytest.raises(StaleIncarnation):
            await handle(state, request, CONTEXT)
    assert not core.removed


def commands(fence: store_node_pb2.Fence) -> list[tuple[Any, Any]]:
    """Every command but CopyBlocks, which needs a second node; that it is fenced is tested with real ones."""
    return [
        (drop_blocks.handle, store_node_pb2.DropBlocksRequest(tenant_id=7, keys=KEY, fence=fence)),
        (
            pin_blocks.handle,
            store_node_pb2.NodePinBlocksRequest(tenant_id=7, keys=KEY, ttl_ms=9, fence=fence),
        ),
        (unpin_blocks.handle, store_node_pb2.NodeUnpinBlocksRequest(tenant_id=7, keys=KEY, fence=fence)),
        (set_draining.handle, store_node_pb2.SetDrainingRequest(draining=True, fence=fence)),
    ]
