"""A cluster in one process on virtual time: real masters (ops, state, duties) and simulated store nodes.

Faults that the cluster promises to survive: messages lost, late, repeated and reordered; nodes that restart
empty or die; masters that stop and are replaced by ones that know nothing; partitions between nodes and the
master. What is true after the network is whole again: the leader's directory is the union of what the nodes
hold.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Iterable
from typing import Any

from mooncache import errors
from mooncache.auth import DEFAULT_TENANT, Authenticator, Token, tenant_id
from mooncache.client.terms import Terms
from mooncache.master.background.duties import master_duties
from mooncache.master.background.rebalance_pool import RebalanceRunner
from mooncache.master.background.repair_replicas import RepairRunner
from mooncache.master.background.run_tasks import TaskRunner
from mooncache.master.core.reports import ReportRules
from mooncache.master.limits import MasterLimits
from mooncache.master.ops.table import master_table
from mooncache.master.shell.node_calls import NodeCalls
from mooncache.master.state import MasterState
from mooncache.proto.v1 import common_pb2, master_pb2, store_node_pb2
from mooncache.runtime.clock import LoopClock
from mooncache.runtime.duties import DutyRunner
from mooncache.runtime.metrics import Metrics
from mooncache.runtime.rpc import MASTER_SERVICE, STORE_NODE_SERVICE, RpcTable
from mooncache.runtime.run_op import OpRunner
from mooncache.store_node.fence import check_fence
from mooncache.testing.memory_channel import MemoryNetwork, NetworkFaults
from tests.master.model_index import ADD, REMOVE, ModelIndex, record
from tests.master.rules import membership_rules, placement_rules, rebalance_rules, repair_rules
from tests.rpcs import answer_of

CLUSTER = Token(DEFAULT_TENANT, admin=True, key=b"s" * 32)
TENANT = tenant_id(DEFAULT_TENANT)
BLOCK_BYTES = 4096
CAPACITY_BYTES = 1 << 20
LIMITS = MasterLimits(
    heartbeat_interval_s=1.0,
    membership=membership_rules(suspect_after_s=3.0, dead_after_s=6.0, forget_after_s=60.0),
    placement=placement_rules(slow_start_s=5.0),
    repair=repair_rules(grace_s=10.0),
    rebalance=rebalance_rules(settle_s=10.0),
    reports=ReportRules(buffered_bytes_max=56 * 64, full_timeout_s=4.0),
    expire_interval_s=0.5,
    check_interval_s=1.0,
    task_interval_s=0.2,
    copy_timeout_s=3.0,
    node_call_timeout_s=2.0,
)


class SimMaster:
    """One master process: everything real except the network and the index's implementation. Term 0: a standby."""

    def __init__(self, world: World, name: str, term: int) -> None:
        self.world = world
        self.name = name
        network = world.network

        def channel_to(target: str) -> object:
            return network.channel(
                name, target, STORE_NODE_SERVICE, token=CLUSTER.text, unavailable_error=errors.NodeUnavailable
            )

        self.state = MasterState(
            LIMITS,
            master_id=name,
            grpc_target=name,
            clock=world.clock,
            nodes=NodeCalls(channel_to, LIMITS.node_calls_max),
            metrics=Metrics("master"),
            make_index=world.make_index,
        )
        self.tasks, self.repairs = TaskRunner(self.state), RepairRunner(self.state)
        self.rebalance = RebalanceRunner(self.state)
        self.duties = DutyRunner(world.clock, world.duty_failed)
        if term:
            self.state.begin_term(term)
        network.serve(name, OpRunner(master_table(self.state), world.clock), Authenticator(CLUSTER))
        self.duties.start(master_duties(self.state, self.tasks, self.repairs, self.rebalance))

    async def kill(self) -> None:
        self.world.network.stop(self.name)
        self.state.leading = False
        await self.duties.stop()
        await self.tasks.stop()
        await self.repairs.stop()
        await self.rebalance.stop()


_UNSUPPORTED = (
    "GetTenants",
    "SetTenants",
    "SetQuarantine",
    "PurgeTenant",
    "GetWriters",
    "RecallWriters",
    "Diagnose",
)


class SimNode:
    """A store node as the master sees one.

    Contents, an event log, a report loop, heartbeats and control calls.
    """

    def __init__(self, world: World, node_id: str, labels: dict[str, str] | None = None) -> None:
        self.world = world
        self.node_id = node_id
        self.labels = labels or {}
        self.rng = random.Random(world.rng.random())
        self.held: dict[bytes, None] = {}
        self.draining = False
        self.eager = self.rng.random() < 0.5  # sends changes while its full report is under way
        self._start()

    def _start(self) -> None:
        self.incarnation = self.rng.getrandbits(63)
        self.log: list[bytes] = []
        self.want_full = False
        self.registered = False
        self.index = -1
        self.draining = False
        self.terms = Terms()
        self.refused: list[str] = []  # commands that were not carried out
        handlers = {
            "CopyBlocks": self._copy_blocks,
            "DropBlocks": self._drop_blocks,
            "PinBlocks": self._pin_blocks,
            "UnpinBlocks": self._unpin_blocks,
            "SetDraining": self._set_draining,
            "GetNodeStatus": self._get_status,
            **dict.fromkeys(_UNSUPPORTED, self._unsupported),
        }
        table = RpcTable(STORE_NODE_SERVICE, self, handlers)
        self.world.network.serve(self.node_id, OpRunner(table, self.world.clock), Authenticator(CLUSTER))
        self._loops = [asyncio.create_task(self._beat()), asyncio.create_task(self._report())]

    async def stop(self) -> None:
        self.world.network.stop(self.node_id)
        for loop in self._loops:
            loop.cancel()
        await asyncio.gather(*self._loops, return_exceptions=True)

    async def restart(self, held: Iterable[bytes] = ()) -> None:
        """kill -9 and a new process: an empty one, or one that takes memory over."""
        await self.stop()
        self.held = dict.fromkeys(held)
        self._start()

    def put(self, key: bytes) -> bool:
        if self.draining:
            return False
        if key not in self.held:
            if len(self.held) * BLOCK_BYTES >= CAPACITY_BYTES:
                self.drop(next(iter(self.held)))
            self.held[key] = None
            self.log.append(record(ADD, TENANT, key, BLOCK_BYTES))
        return True

    def drop(self, key: bytes) -> None:
        if key in self.held:
            del self.held[key]
            self.log.append(record(REMOVE, TENANT, key, BLOCK_BYTES))

    # --- talking to the master ---------------------------------------------------------------------------

    async def _call(self, method: str, request: object, timeout_s: float = 0.8) -> object:
        channel = self.world.network.channel(self.node_id, self.world.leader, token=CLUSTER.text)
        try:
            return await channel.call(method, request, answer_of(MASTER_SERVICE, method), timeout_s)
        except errors.UnknownNode:
            self.registered = False
        except errors.MooncacheError:
            pass
        return None

    async def _beat(self) -> None:
        while True:
            if not self.registered:
                await self._register()
            response = await self._call(
                "Heartbeat",
                master_pb2.HeartbeatRequest(
                    node_id=self.node_id,
                    incarnation=self.incarnation,
                    capacity_bytes=CAPACITY_BYTES,
                    used_bytes=len(self.held) * BLOCK_BYTES,
                    block_count=len(self.held),
                    state=common_pb2.NODE_STATE_DRAINING if self.draining else common_pb2.NODE_STATE_ACTIVE,
                    tenant_names={TENANT: DEFAULT_TENANT},
                    last_seq=len(self.log),
                ),
            )
            if response is not None:
                self.want_full = self.want_full or response.want_full_report
                for command in response.commands:
                    self.draining = command == master_pb2.NODE_COMMAND_DRAIN_ON
            await self.world.clock.sleep(1.0)

    async def _register(self) -> None:
        response = await self._call(
            "RegisterNode",
            master_pb2.RegisterNodeRequest(
                node_id=self.node_id,
                incarnation=self.incarnation,
                host_id=f"host-{self.node_id}",
                protocol_minor=1,
                endpoints=common_pb2.Endpoints(grpc_target=self.node_id, tcp_host="sim", tcp_port=1),
                segments=[common_pb2.Segment(id=0, tier=2, capacity_bytes=CAPACITY_BYTES)],
                labels=self.labels,
            ),
        )
        if response is not None and self.terms.hear(response.term, self.world.clock.now_s()):
            self.registered, self.index = True, response.node_index
            self.want_full = self.want_full or response.want_full_report

    async def _report(self) -> None:
        acked, report_id = 0, 0
        while True:
            await self.world.clock.sleep(self.rng.uniform(0.05, 0.3))
            if not self.registered:
                continue
            if self.want_full:
                self.want_full = False
                report_id = self.rng.getrandbits(62) + 1
                done = await self._report_full(report_id)
                acked = done if done is not None else acked
                self.want_full = self.want_full or done is None
            elif len(self.log) > acked:
                last = len(self.log)
                if last - acked > 1 and self.rng.random() < 0.05:
                    acked = last - 1  # a log that overflowed: the master has to notice the gap
                response = await self._send(
                    master_pb2.REPORT_KIND_DELTA, 0, acked + 1, last, 0, b"".join(self.log[acked:last])
                )
                if response is not None:
                    self.want_full = self.want_full or response.need_full
                    acked = max(acked, response.acked_seq)

    async def _report_full(self, report_id: int) -> int | None:
        """BEGIN, then all parts at once (they overtake each other), then END; any failure starts over."""
        base = len(self.log)
        begun = await self._send(master_pb2.REPORT_KIND_FULL_BEGIN, report_id, base, base, 0, b"")
        if begun is None or begun.need_full:
            return None
        parts: list[asyncio.Task[object]] = []
        cut = max(1, len(self.held) // 4)
        keys = list(self.held)
        for part, at in enumerate(range(0, len(keys), cut)):
            held = [key for key in keys[at : at + cut] if key in self.held]
            body = b"".join(record(ADD, TENANT, key, BLOCK_BYTES) for key in held)
            parts.append(
                asyncio.create_task(
                    self._send(master_pb2.REPORT_KIND_FULL_PART, report_id, base, base, part, body)
                )
            )
            if self.rng.random() < 0.5:
                await self.world.clock.sleep(self.rng.choice([0.01, 0.4]))
            if self.eager and len(self.log) > base:
                last = len(self.log)
                answer = await self._send(
                    master_pb2.REPORT_KIND_DELTA, 0, base + 1, last, 0, b"".join(self.log[base:last])
                )
                if answer is None or answer.need_full:
                    return None
        for part in parts:
            answer = await part
            if answer is None or answer.need_full:
                return None
        ended = await self._send(master_pb2.REPORT_KIND_FULL_END, report_id, base, base, len(parts), b"")
        return None if ended is None or ended.need_full else base

    async def _send(
        self, kind: int, report_id: int, first: int, last: int, part: int, records: bytes
    ) -> object:
        request = master_pb2.ReportBlocksRequest(
            node_id=self.node_id,
            incarnation=self.incarnation,
            kind=kind,
            report_id=report_id,
            first_seq=first,
            last_seq=last,
            part_index=part,
            records=records,
        )
        for _ in range(3):
            response = await self._call("ReportBlocks", request)
            if response is not None:
                return response
        return None

    # --- what the master asks of a node -------------------------------------------------------------------

    async def _copy_blocks(self, _: object, request: store_node_pb2.CopyBlocksRequest, __: object) -> object:
        self._obey(request)
        source = self.world.nodes.get(request.source.node_id)
        codes, copied = [], 0
        for key in split(request.keys):
            await self.world.clock.sleep(0.001)
            if key in self.held:
                codes.append(errors.AlreadyExists.code)
            elif source is None or source.incarnation != request.source.incarnation or key not in source.held:
                codes.append(errors.NotFound.code)
            else:
                codes.append(errors.OK if self.put(key) else errors.Draining.code)
                copied += BLOCK_BYTES
        return store_node_pb2.CopyBlocksResponse(codes=codes, copied_bytes=copied)

    def _obey(self, request: Any) -> None:
        try:
            check_fence(self.terms, self.incarnation, request.fence)
        except errors.NotLeader:
            self.refused.append(type(request).__name__)
            raise

    async def _drop_blocks(self, _: object, request: store_node_pb2.DropBlocksRequest, __: object) -> object:
        self._obey(request)
        keys = split(request.keys)
        codes = [errors.OK if key in self.held else errors.NotFound.code for key in keys]
        for key in keys:
            self.drop(key)
        return store_node_pb2.DropBlocksResponse(codes=codes)

    async def _pin_blocks(self, _: object, request: Any, __: object) -> object:
        self._obey(request)
        codes = [errors.OK if key in self.held else errors.NotFound.code for key in split(request.keys)]
        return store_node_pb2.NodePinBlocksResponse(codes=codes)

    async def _unpin_blocks(self, _: object, request: Any, __: object) -> object:
        self._obey(request)
        codes = [errors.OK if key in self.held else errors.NotFound.code for key in split(request.keys)]
        return store_node_pb2.NodeUnpinBlocksResponse(codes=codes)

    async def _set_draining(self, _: object, request: object, __: object) -> object:
        self.draining = request.draining
        return store_node_pb2.SetDrainingResponse()

    async def _get_status(self, _: object, request: object, __: object) -> object:
        return store_node_pb2.GetNodeStatusResponse(node_id=self.node_id, incarnation=self.incarnation)

    async def _unsupported(self, _: object, __: object, ___: object) -> object:
        raise errors.Unsupported("Nodes of this world have neither a table of tenants nor a host.")


class World:
    """Masters, nodes and the network between them; everything is drawn from `seed`."""

    def __init__(self, seed: int, make_index: Callable[[], object] = ModelIndex) -> None:
        self.seed = seed
        self.rng = random.Random(seed)
        self.clock = LoopClock()
        self.network = MemoryNetwork(self.clock, random.Random(self.rng.random()))
        self.make_index = make_index
        self.nodes: dict[str, SimNode] = {}
        self.term = 0
        self.leader = ""
        self.master: SimMaster
        self.failed_duties: list[tuple[str, str]] = []
        self.start_master()

    def duty_failed(self, duty: str, code: str) -> None:
        self.failed_duties.append((duty, code))

    def start_master(self) -> None:
        """Start a master that knows nothing and leads."""
        self.term += 1
        self.leader = f"master-{self.term}"
        self.master = SimMaster(self, self.leader, self.term)

    async def fail_over(self, pause_s: float = 0.5) -> None:
        """kill -9 the leader; an empty one follows."""
        await self.master.kill()
        await self.clock.sleep(pause_s)
        self.start_master()

    def add_node(self, name: str, labels: dict[str, str] | None = None) -> SimNode:
        self.nodes[name] = SimNode(self, name, labels)
        return self.nodes[name]

    async def call(self, method: str, request: object, token: str = "", timeout_s: float = 2.0) -> object:
        channel = self.network.channel("operator", self.leader, token=token or CLUSTER.text)
        return await channel.call(method, request, answer_of(MASTER_SERVICE, method), timeout_s)

    def bad_network(self) -> None:
        """Faults drawn from the seed."""
        self.network.faults = NetworkFaults(
            loss=self.rng.uniform(0.0, 0.25),
            duplicate=self.rng.uniform(0.0, 0.3),
            delay_max_s=self.rng.choice([0.002, 0.05, 0.3]),
            slow=self.rng.uniform(0.0, 0.1),
            slow_delay_s=self.rng.choice([0.5, 2.0, 8.0]),
        )

    def good_network(self) -> None:
        self.network.heal()
        self.network.faults = NetworkFaults()

    def listed(self) -> set[tuple[str, bytes]]:
        """What the leader's directory says: (node id, key)."""
        state = self.master.state
        keys = sorted({key for node in self.nodes.values() for key in node.held} | KNOWN_KEYS)
        where = state.directory.holders(TENANT, keys)
        names = {node.index: node.node_id for node in state.membership.nodes.values()}
        return {(names[holder], key) for key, holders in zip(keys, where, strict=True) for holder in holders}

    def truth(self) -> set[tuple[str, bytes]]:
        """What the nodes hold: (node id, key)."""
        return {(name, key) for name, node in self.nodes.items() for key in node.held}

    async def converge(self, limit_s: float = 60.0) -> None:
        """Wait until the directory is the union of the nodes' contents.

        Raises AssertionError after `limit_s`.
        """
        until_s = self.clock.now_s() + limit_s
        while True:
            self.master.state.check()
            state = self.master.state
            whole = len(state.membership.nodes) >= len(self.nodes) and state.completeness() >= 1.0
            if whole and self.listed() == self.truth():
                return
            if self.clock.now_s() > until_s:
                extra, missing = self.listed() - self.truth(), self.truth() - self.listed()
                raise AssertionError(
                    f"seed {self.seed}: {len(extra)} listed but not held, "
                    f"{len(missing)} held but not listed, "
                    f"completeness {state.completeness()}"
                )
            await self.clock.sleep(0.5)

    async def stop(self) -> None:
        for node in self.nodes.values():
            await node.stop()
        await self.master.kill()
        assert not self.failed_duties, f"seed {self.seed}"
        assert self.master.state.instruments.broken_invariants._value.get() == 0, f"seed {self.seed}"


KNOWN_KEYS = {bytes([n]) * 32 for n in range(64)}


def split(keys: bytes) -> list[bytes]:
    return [keys[at : at + 32] for at in range(0, len(keys), 32)]
