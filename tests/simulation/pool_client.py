"""Clients of the pool: the SDK's map keeper, master link and placement over the modelled data plane, and their load."""

from __future__ import annotations

import asyncio
import random
from collections import deque
from typing import TYPE_CHECKING, Any

from google.protobuf.message import Message

from mooncache import errors
from mooncache.client.map_keeper import MapKeeper
from mooncache.client.master_link import MasterLink
from mooncache.client.results import ClusterView, MapNodeState
from mooncache.errors import MooncacheError
from mooncache.master.core.directory import unpack_holders
from mooncache.master.core.placement import Candidate, choose_nodes
from mooncache.proto.v1 import master_pb2
from mooncache.runtime.rpc import MASTER_SERVICE
from tests.rpcs import answer_of
from tests.simulation.model_store import BlockName

if TYPE_CHECKING:
    from tests.simulation.world import World

BURST_BLOCKS = 16
_CALL_S = 2.0
_GRACE_S = 1.0  # beyond a deadline, for the call's own end


class PoolClient:
    """One life of a client's process: it puts, gets, pins, removes, trims, replicates and drains, as the seed says."""

    def __init__(self, world: World, name: str, *, loads: bool = True) -> None:
        self.world, self.name = world, name
        self.process = world.begin(name)
        self.rng = random.Random(world.rng.random())
        self.line = f"{name}#{self.rng.getrandbits(32):08x}"
        self.view = ClusterView()
        self.copied: deque[BlockName] = deque(maxlen=8)  # blocks of which more copies were made for a load
        self.process.run(self._build)
        self.process.spawn(self.keeper.run())
        if loads:
            self.process.spawn(self._load())

    def _build(self) -> None:
        world = self.world
        self.clock = world.clock_of(self.process)
        channel_to = world.network.channel_for(MASTER_SERVICE, errors.MasterUnavailable)
        self.link = MasterLink(world.masters_targets, channel_to, self.clock, self.rng)
        self.keeper = MapKeeper(self.link, self._apply, self.clock, self.rng, wait_s=4.0)

    def _apply(self, view: ClusterView) -> None:
        if (view.term, view.epoch) < (self.view.term, self.view.epoch):
            self.world.ledger.counts["older maps"] += 1
        self.view = view

    async def _load(self) -> None:
        work = [
            (self.put_one, 42), (self.get_one, 33), (self.remove, 3), (self.trim, 8), (self.replicate, 7),
            (self.pin, 6), (self.burst, 2), (self.drain, 1.5), (self.ask_status, 1.5),
        ]  # fmt: skip
        calls, weights = [each for each, _ in work], [weight for _, weight in work]
        while not self.world.calm:
            await self.clock.sleep(self.rng.expovariate(1 / self.world.shape.think_s))
            (call,) = self.rng.choices(calls, weights)
            try:
                await self._ends(call(), call.__name__)
            except MooncacheError as error:
                self.world.ledger.counts[f"{call.__name__} {error.name}"] += 1
            else:
                self.world.ledger.counts[f"{call.__name__} OK"] += 1

    async def _ends(self, call: Any, what: str) -> None:
        """Whatever happens, a call ends by its deadline."""
        limit_s = 8 * _CALL_S + _GRACE_S
        begun_s, waited_s = self.clock.now_s(), self.process.stopped_s
        await call
        took_s = self.clock.now_s() - begun_s - (self.process.stopped_s - waited_s)
        if took_s > limit_s:
            self.world.ledger.ended_late(self.name, what, took_s)

    # --- blocks

    def _name(self) -> BlockName:
        return self.world.any_block(self.rng)

    async def put_one(self) -> None:
        """A put of a durable block wants two copies; of another one as many as its load seems to want."""
        name = self._name()
        replicas = 2 if name[1] in self.world.ledger.durable else self.rng.choice([1, 1, 2, 3])
        nodes = [
            Candidate(node.node_id, node.host_id, node.weight)
            for node in self.view.nodes
            if node.state is MapNodeState.ACTIVE and node.weight > 0
        ]
        if not nodes:
            raise errors.NoNodes("No node takes blocks.")
        done = 0
        for target in choose_nodes(name[1], nodes, replicas):
            try:
                await self._put_at(target.node_id, name)
                done += 1
            except MooncacheError as error:
                self.world.ledger.counts[f"put at a node {error.name}"] += 1
        if not done:
            raise errors.NodeUnavailable("No node took the block.")
        if done > 1 and name[1] not in self.world.ledger.durable:
            self.copied.append(name)

    async def burst(self) -> None:
        """Many blocks at one node at once: more changes than its log of events may hold until the next report."""
        nodes = [node.node_id for node in self.view.nodes if node.state is MapNodeState.ACTIVE]
        if not nodes:
            raise errors.NoNodes("No node takes blocks.")
        node_id = self.rng.choice(nodes)
        names = dict.fromkeys(self.world.any_block(self.rng) for _ in range(BURST_BLOCKS))
        puts = [self._put_at(node_id, name) for name in names if name[1] not in self.world.ledger.durable]
        await asyncio.gather(*puts, return_exceptions=True)

    async def _put_at(self, node_id: str, name: BlockName) -> None:
        node = self.world.nodes[node_id]
        incarnation = next(n.incarnation for n in self.view.nodes if n.node_id == node_id)
        if node.state.identity.incarnation != incarnation and self.rng.random() < 0.5:
            raise errors.StaleIncarnation("The map names an earlier life of the node.")
        call = self.world.network.data_call
        core = node.core  # of the life that the connection was made to
        line = self.line
        try:
            if not await call(self.name, node_id, lambda: core.reserve(line, name), _CALL_S):
                return
            await call(self.name, node_id, lambda: core.write(line, name, name), _CALL_S)
            await call(self.name, node_id, lambda: core.commit(line, name), _CALL_S)
        except MooncacheError:
            core.close_line(line)  # the connection ends, and with it the reservation
            self.line = f"{self.name}#{self.rng.getrandbits(32):08x}"
            raise
        self.world.ledger.copy_made(node_id, name)

    async def get_one(self) -> None:
        """Where the map's order says first, then where the master says."""
        name = self._name()
        ranked = choose_nodes(
            name[1], [Candidate(n.node_id, n.host_id, n.weight) for n in self.view.nodes if n.weight > 0], 2
        )
        tried = [node.node_id for node in ranked]
        if self.rng.random() < 0.5:
            answer = await self.call(
                "Locate", master_pb2.LocateRequest(keys=name[1], tenant=self.world.tenant_name(name))
            )
            holders = unpack_holders(answer.locations)[0]
            known = {node.index: node.node_id for node in self.view.nodes}
            tried = [known[holder] for holder in holders if holder in known] + tried
        for node_id in dict.fromkeys(tried[:4]):
            try:
                await self.world.read_block(self.name, node_id, name, _CALL_S, 0)
                return
            except MooncacheError as error:
                self.world.ledger.counts[f"get at a node {error.name}"] += 1
        raise errors.NotFound("It is nowhere.")

    # --- what the master does

    async def call(self, method: str, request: Message) -> Any:
        return await self.link.call(
            method, request, answer_of(MASTER_SERVICE, method), _CALL_S, attempt_s=1.0
        )

    async def remove(self) -> None:
        name = self.world.cache_block(self.rng)
        key = name[1]
        self.world.ledger.removed.add(key)
        await self.call(
            "RemoveBlocks", master_pb2.RemoveBlocksRequest(keys=key, tenant=self.world.tenant_name(name))
        )

    async def trim(self) -> None:
        """The load for which copies were made is over."""
        name = self.copied.popleft() if self.copied else self.world.cache_block(self.rng)
        request = master_pb2.TrimBlocksRequest(
            keys=name[1], replica_count=1, tenant=self.world.tenant_name(name)
        )
        await self.call("TrimBlocks", request)

    async def replicate(self) -> None:
        name = self.world.cache_block(self.rng)
        request = master_pb2.ReplicateBlocksRequest(
            keys=name[1],
            replica_count=self.rng.choice([2, 3]),
            tenant=self.world.tenant_name(name),
            spare=self.rng.random() < 0.7,
        )
        await self.call("ReplicateBlocks", request)
        self.copied.append(name)

    async def pin(self) -> None:
        """Pin a block for a while; some give it back soon."""
        name, pins = self.world.cache_block(self.rng), self.world.ledger.pins
        ttl_ms, tenant = round(self.rng.uniform(1.0, 6.0) * 1e3), self.world.tenant_name(name)
        asked_s = self.clock.now_s()
        pins.asks(name, ttl_ms)
        request = master_pb2.PinBlocksRequest(keys=name[1], ttl_ms=ttl_ms, tenant=tenant)
        answer = await self.call("PinBlocks", request)
        if answer.codes[0] == errors.OK:
            pins.promised(name, asked_s, ttl_ms)
            if self.rng.random() < 0.3:
                pins.gives_back(name)
                await self.call("UnpinBlocks", master_pb2.UnpinBlocksRequest(keys=name[1], tenant=tenant))

    async def drain(self) -> None:
        request = master_pb2.DrainNodeRequest(
            node_id=self.rng.choice(sorted(self.world.nodes)),
            cancel=self.rng.random() < 0.6,
            move_blocks=True,
        )
        await self.call("DrainNode", request)

    async def ask_status(self) -> None:
        await self.call("GetStatus", master_pb2.GetStatusRequest())


async def read_block(
    world: World, who: str, node_id: str, name: BlockName, timeout_s: float, incarnation: int
) -> BlockName:
    """One get at one node: pin, bytes, checksum, unpin. Raises MooncacheError."""
    node = world.nodes.get(node_id)
    if node is None:
        raise errors.NodeUnavailable("There is no such node.")
    if incarnation and node.state.identity.incarnation != incarnation:
        raise errors.StaleIncarnation("Another life of the node was meant.")
    core, line, call = node.core, f"{who}!{next(world.lines)}", world.network.data_call
    try:
        extent = await call(who, node_id, lambda: core.begin_read(line, name), timeout_s)
        data = await call(who, node_id, lambda: core.read(line, extent), timeout_s)
        if data != name:
            if not world.disks_lied:  # else it is what checksums are there for
                world.ledger.read(who, name, data)
            await call(who, node_id, lambda: core.quarantine(name), timeout_s)
            raise errors.ChecksumMismatch("The bytes are not those that were put.")
        world.ledger.read(who, name, data)
        return name
    finally:
        core.close_line(line)
