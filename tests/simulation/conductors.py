"""Conductors of a simulated cluster: real state, operations, duties and lines to each other; a modelled pool."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any

from mooncache import _native, errors
from mooncache.auth import DEFAULT_TENANT, tenant_id
from mooncache.client.keys import split_keys
from mooncache.client.results import BlockCopy, MatchResult, NodeView, Prefetched
from mooncache.conductor.background.duties import conductor_duties
from mooncache.conductor.ops.table import conductor_table
from mooncache.conductor.shell.copies import Copies
from mooncache.conductor.shell.peers import Peers
from mooncache.conductor.shell.pool import PoolLookup
from mooncache.conductor.shell.pool_status import PoolStatus
from mooncache.conductor.state import ConductorState
from mooncache.coordination import MasterRecord
from mooncache.errors import MooncacheError
from mooncache.proto.v1 import conductor_pb2 as pb
from mooncache.runtime.duties import DutyRunner
from mooncache.runtime.metrics import Metrics
from mooncache.runtime.run_op import OpRunner
from tests.simulation.elections import Elector, holds
from tests.simulation.network import CLUSTER
from tests.simulation.pool_client import PoolClient

if TYPE_CHECKING:
    from tests.simulation.world import World


class SimConductor:
    """One life of a conductor's process."""

    def __init__(self, world: World, name: str) -> None:
        self.world, self.name = world, name
        self.store = PoolClient(world, name, loads=False)
        self.process = self.store.process
        self.clock = world.clock_of(self.process)
        self.state: ConductorState
        self.process.run(self._build)
        self.process.spawn(self._run())

    def _build(self) -> None:
        world, config = self.world, self.world.config
        rng = random.Random(world.rng.random())

        async def connect() -> Any:
            return PoolView(self)

        self.state = ConductorState(
            config,
            clock=self.clock,
            pool=PoolLookup(config, CLUSTER.text, self.clock, connect),
            copies=Copies(config, CLUSTER.text, self.clock),
            metrics=Metrics("conductor"),
            rng=rng,
            make_index=lambda: _native.BlockIndex(hash_seed=world.seed + 2),
        )
        leadership = self.state.leadership
        self.elector: Elector | None = None
        if leadership.elected:
            self.elector = world.elections.coordinator(
                "conductors", config.conductor.election, self.name, self.clock
            )
            self._watch_terms()
        self.peers = None if leadership.alone else Peers(leadership.targets, CLUSTER.text, config)
        runner = OpRunner(conductor_table(self.state), self.clock, world.observer(self.name))
        world.network.listen(self.name, self.process, runner)

    def _watch_terms(self) -> None:
        """Look, when a term begins, whether nobody else leads."""
        begin_term, world = self.state.begin_term, self.world

        def begin() -> None:
            if self.holds:
                others = [
                    other.name for other in world.conductors.values() if other is not self and other.holds
                ]
                world.ledger.leads_alone(self.name, others)
            begin_term()

        self.state.begin_term = begin  # type: ignore[method-assign]

    async def _run(self) -> None:
        if self.elector is not None:
            await self.elector.start(MasterRecord(self.name, self.name))
        duties = DutyRunner(self.clock, self.world.duty_failed(self.name))
        pool = PoolStatus(self.world.config, CLUSTER.text, self.clock, random.Random(self.world.seed))
        duties.start(conductor_duties(self.state, self.peers, pool, self._member, self.elector))

    def _member(self) -> pb.Member:
        return pb.Member(kind=pb.MEMBER_KIND_CONDUCTOR, name=self.name, address=self.name, host_id=self.name)

    @property
    def leads(self) -> bool:
        return not self.process.dead and self.state.leadership.leads

    @property
    def holds(self) -> bool:
        """Whether a third party elected this process, and nobody else may lead."""
        return self.elector is not None and not self.process.dead and holds(self.elector, self.clock)

    def check(self) -> None:
        """Raise AssertionError when an invariant is broken."""
        self.state.check()


class PoolView:
    """What a conductor asks of the pool, as `AsyncClient` has it."""

    def __init__(self, conductor: SimConductor) -> None:
        self._conductor, self._world = conductor, conductor.world

    def nodes(self) -> tuple[NodeView, ...]:
        return self._conductor.store.view.nodes

    async def match(self, keys: bytes, *, touch: bool = True, timeout_s: float | None = None) -> MatchResult:
        world, names = self._world, [world_name(key) for key in split_keys(keys)]
        found: list[list[BlockCopy]] = [[] for _ in names]
        unreachable = 0
        for node in self.nodes():
            place = world.nodes.get(node.node_id)
            if place is None:
                continue
            core = place.core
            try:
                there = await world.network.data_call(
                    self._conductor.name,
                    node.node_id,
                    lambda core=core: [name in core.held for name in names],
                    timeout_s or 0.05,
                )
            except MooncacheError:
                unreachable += 1
                continue
            for copies, is_there in zip(found, there, strict=True):
                if is_there:
                    copies.append(BlockCopy(node.node_id, "DRAM"))
        present = tuple(map(bool, found))
        leading = next((n for n, is_there in enumerate(present) if not is_there), len(present))
        return MatchResult(leading, present, unreachable, tuple(map(tuple, found)))

    async def give_up(self, keys: bytes, *, node: str | None = None, timeout_s: float | None = None) -> int:
        """End the waits of engines for these blocks."""
        await self._conductor.clock.sleep(self._world.network.delay_s())
        ended = 0
        for key in split_keys(keys):
            for waiting in self._world.waits.get(key, ()):
                ended += not waiting.is_set()
                waiting.set()
        return ended

    async def prefetch(
        self, keys: bytes, *, begin_s: float = 1.0, timeout_s: float | None = None
    ) -> Prefetched:
        return Prefetched(0, 0)

    def for_tenant(self, session_token: str) -> PoolView:
        raise errors.Unsupported("Blocks of engines belong to the cluster here.")

    async def close(self) -> None:
        """Nothing is open."""


def world_name(key: bytes) -> tuple[int, bytes]:
    """A block of the engines: they share the default tenant."""
    return tenant_id(DEFAULT_TENANT), key
