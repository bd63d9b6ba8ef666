"""One simulated cluster: what it is made of comes from the seed."""

from __future__ import annotations

import asyncio
import functools
import hashlib
import itertools
import random
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from mooncache import _native, errors
from mooncache.auth import tenant_id
from mooncache.config import Config, load
from mooncache.kvcache.block_index import BlockIndex
from mooncache.kvcache.instance_role import InstanceRole
from mooncache.kvcache.keys import passport_from_json
from tests.conductor.support import PASSPORT as PASSPORT_JSON
from tests.simulation import elections, pool_client
from tests.simulation.conductors import SimConductor
from tests.simulation.engines import SimEngine, SimWorker, drawn_role
from tests.simulation.gateways import SimGateway
from tests.simulation.ledger import Ledger
from tests.simulation.masters import SimMaster
from tests.simulation.model_store import TENANTS, BlockName
from tests.simulation.network import SimNetwork, Trace
from tests.simulation.nodes import SimNode
from tests.simulation.pool_client import PoolClient
from tests.simulation.scheduler import Process, Scheduler

WALL_START_S = 1_700_000_000.0
SERVING_EVERY = 4
"""One seed in so many has conductors, engines, workers and gateways, too; the others are of the pool alone."""
PASSPORT = passport_from_json(PASSPORT_JSON)


@functools.cache
def config_of(conductors: str, masters: str, election: str) -> Config:
    """The configuration of conductors, workers and gateways."""
    settings = {
        "cluster.state_dir": "/nowhere",
        "cluster.master_targets": masters,
        "cluster.conductor_target": conductors,
        "conductor.election": election,
        "conductor.inline_tokens_max": 32,
        "conductor.suspect_after_s": 1.5,
        "conductor.lease_s": 4.0,
        "conductor.request_timeout_s": 300.0,  # nothing is mended by waiting for it
        "gateway.request_timeout_s": 10.0,
        "gateway.first_token_timeout_s": 4.0,
        "gateway.stall_timeout_s": 3.0,
        "gateway.tenant_sessions_enabled": False,
    }
    return load(env={}, overrides=settings)


def _wake(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)


class ProcessClock:
    """The clocks of one process, at a rate of their own; the wall clock of its host may be wrong, and jump."""

    def __init__(self, process: Process) -> None:
        self._process = process

    def now_s(self) -> float:
        return self._process.loop.virtual_now_s * self._process.rate

    def wall_s(self) -> float:
        return WALL_START_S + self.now_s() + self._process.wall_offset_s

    async def sleep(self, delay_s: float) -> None:
        """As `asyncio.sleep`, which most callbacks of a run come from."""
        if delay_s <= 0.0:
            await asyncio.sleep(0.0)
            return
        loop = self._process.loop
        woken = loop.create_future()
        timer = loop.call_later(delay_s, _wake, woken)
        try:
            await woken
        finally:
            timer.cancel()


@dataclass(slots=True)
class Shape:
    """How a cluster is made."""

    masters: int
    nodes: int
    clients: int
    conductors: int
    engines: int
    gateways: int
    extents: int
    log_events: int
    keys: int
    think_s: float
    replicas: int
    disks: bool
    serving: bool
    racks: int
    trouble_s: float
    masters_elect: str
    conductors_elect: str
    quotas: dict[int, int] = field(default_factory=dict)

    @classmethod
    def drawn(cls, rng: random.Random, *, serving: bool) -> Shape:
        shape = cls(
            masters=rng.choice([1, 2, 2, 3]),
            nodes=rng.randrange(2, 5),
            clients=rng.randrange(1, 4),
            conductors=rng.choice([1, 2, 2, 3]),
            engines=rng.randrange(2, 5),
            gateways=rng.randrange(1, 3),
            extents=rng.choice([12, 40, 40, 80]),
            log_events=rng.choice([4, 24, 1000]),
            keys=rng.choice([16, 32]),
            think_s=rng.choice([0.02, 0.06, 0.15]),
            replicas=rng.choice([1, 2, 2]),
            disks=rng.random() < 0.4,
            serving=serving,
            racks=rng.choice([1, 2, 3]),
            trouble_s=rng.uniform(8.0, 16.0),
            masters_elect=rng.choice(["etcd", "lease"]),
            conductors_elect=rng.choice(["peers", "peers", "etcd", "lease"]),
        )
        if shape.masters == 1 and rng.random() < 0.5:
            shape.masters_elect = "embedded"
        if rng.random() < 0.4:
            shape.quotas = {tenant_id(TENANTS[1]): rng.randrange(3, 9)}
        return shape


class World:
    """The cluster, its network and its clock. `calm` once clients and faults have ended."""

    def __init__(self, seed: int, loop: Scheduler) -> None:
        self.seed, self.loop = seed, loop
        self.rng = random.Random(f"world {seed}")
        self.shape = Shape.drawn(self.rng, serving=seed % SERVING_EVERY == 0)
        self.trace = Trace()
        self.calm = self.disks_lied = False
        self.lines = itertools.count(1)
        outside = Process(loop, "outside")
        self.clock = ProcessClock(outside)
        self.network = SimNetwork(self.clock, random.Random(self.rng.random()), self.trace)
        self.elections = elections.Elections(self)
        self.ledger = Ledger(self.clock.now_s)
        self.ledger.holders = self.holders
        self.ledger.lasting = lambda name: [
            each for each in self.holders(name) if not self.nodes[each].state.draining
        ]
        self.processes: dict[str, Process] = {}
        self.keys = [hashlib.sha256(f"{seed}/{n}".encode()).digest() for n in range(self.shape.keys)]
        self.ledger.durable = set(self.keys[: len(self.keys) // 2]) if self.shape.replicas > 1 else set()
        self.masters_targets = [f"master-{n}:1" for n in range(self.shape.masters)]
        self.masters: dict[str, SimMaster] = {}
        self.nodes: dict[str, SimNode] = {}
        self.clients: dict[str, PoolClient] = {}
        self.coverage: Counter[tuple[str, str]] = Counter()
        self.conductor_targets = [f"conductor-{n}:1" for n in range(self.shape.conductors)]
        self.candidates = {*self.masters_targets, *self.conductor_targets}
        self.conductors: dict[str, SimConductor] = {}
        self.engines: dict[str, SimEngine] = {}
        self.workers: dict[str, SimWorker] = {}
        self.gateways: dict[str, SimGateway] = {}
        self.waits: dict[bytes, list[asyncio.Event]] = {}  # of engines, for blocks
        self.gone: set[str] = set()  # nodes that do not come back
        self.victim = ""  # the process that the last fault hit
        self.no_requests = False
        self.whole_since_s: float | None = None  # no fault is left since then
        self.calm_requests: list[tuple[str, str]] = []  # tenant and request, of those that have ended
        targets = ",".join(self.conductor_targets)
        self.config = config_of(targets, ",".join(self.masters_targets), self.shape.conductors_elect)
        self.prompts = [f"p{n}" for n in range(8)]
        self._prompt_keys = {name: self._drawn_keys(name) for name in self.prompts}
        self.known_keys = sorted({*self.keys, *(key for keys in self._prompt_keys.values() for key in keys)})
        engines = [f"engine-{n}" for n in range(self.shape.engines)]
        self.roles = {name: drawn_role(self.rng) for name in engines}
        self.roles[engines[0]] = InstanceRole.BOTH

    def build_pool(self) -> None:
        """Start masters, nodes and clients."""
        for name in self.masters_targets:
            self.masters[name] = SimMaster(self, name)
        for n in range(self.shape.nodes):
            labels = {"rack": f"r{n % self.shape.racks}"} if self.shape.racks > 1 else {}
            self.nodes[f"node-{n}"] = SimNode(self, f"node-{n}", labels)
        for n in range(self.shape.clients):
            self.clients[f"client-{n}"] = PoolClient(self, f"client-{n}")

    def build_serving(self) -> None:
        """Start conductors, engines with their workers, and gateways, where the seed has them."""
        if not self.shape.serving:
            return
        for target in self.conductor_targets:
            self.conductors[target] = SimConductor(self, target)
        for n, engine in enumerate(self.roles):
            self.engines[engine] = SimEngine(self, engine)
            self.workers[f"worker-{n}"] = SimWorker(self, f"worker-{n}", engine, PASSPORT)
        for n in range(self.shape.gateways):
            self.gateways[f"gateway-{n}"] = SimGateway(self, f"gateway-{n}")

    def _drawn_keys(self, name: str) -> list[bytes]:
        """The keys of a prompt's blocks; prompts of one half of the list begin alike."""
        shared, own = self.rng.randrange(0, 4), self.rng.randrange(1, 5)
        family = f"{self.seed}/family{int(name[1:]) % 2}"
        names = [f"{family}/{n}" for n in range(shared)] + [f"{self.seed}/{name}/{n}" for n in range(own)]
        return [hashlib.sha256(each.encode()).digest() for each in names]

    def prompt_keys(self, name: str) -> list[bytes]:
        """The keys of a prompt's blocks."""
        return self._prompt_keys[name]

    # --- processes

    def begin(self, name: str) -> Process:
        """A process begins."""
        process = self.processes[name] = Process(self.loop, name)
        if name in self.candidates:
            process.rate = self.rng.uniform(1 - elections.DRIFT_MAX, 1 + elections.DRIFT_MAX)
        self.trace.note(self.clock.now_s(), "begin", name)
        return process

    def end(self, process: Process) -> None:
        """It is killed: nothing of it runs any more, and its connections break."""
        self.trace.note(self.clock.now_s(), "end", process.name)
        process.kill()
        self.network.reset(process.name)
        if process.name in self.masters:
            elections.died(self.masters[process.name].elector)
        node = self.nodes.get(process.name)
        if node is not None:
            self.ledger.process_died(process.name, list(node.core.held), kept=bool(node.disk))
        for each in self.nodes.values():
            each.core.close_lines(process.name)

    def crash(self, name: str) -> None:
        """kill -9."""
        if name in self.nodes:
            self.nodes[name].power_off(self.shape.disks)
        else:
            self.end(self.processes[name])

    def restart(self, name: str) -> None:
        """A new process in the place of one that has died."""
        if not self.processes[name].dead or name in self.gone:
            return
        if name in self.nodes:
            self.nodes[name].start()
        elif name in self.masters:
            self.masters[name] = SimMaster(self, name)
        elif name in self.clients:
            self.clients[name] = PoolClient(self, name)
        elif name in self.conductors:
            self.conductors[name] = SimConductor(self, name)
        elif name in self.engines:
            self.engines[name] = SimEngine(self, name)
        elif name in self.workers:
            self.workers[name] = SimWorker(self, name, self.workers[name].engine_name, PASSPORT)
        else:
            self.gateways[name] = SimGateway(self, name)

    def revive(self) -> None:
        """Everything that has died is started."""
        for name in sorted(self.processes):
            self.restart(name)

    def over(self) -> None:
        """Let go of what the world has outside of this process's memory."""
        for master in self.masters.values():
            elections.died(master.elector)
        self.elections.close()

    def later(self, delay_s: float, call: Callable[[], object]) -> None:
        """Do something after a while."""
        self.loop.call_later(delay_s, call)

    def clock_of(self, process: Process) -> ProcessClock:
        """The clocks of a process."""
        return ProcessClock(process)

    def make_index(self) -> BlockIndex:
        """An empty index for a master, the native one."""
        index: BlockIndex = _native.BlockIndex(hash_seed=self.seed + 1)
        return index

    def duty_failed(self, who: str) -> Callable[[str, str], None]:
        """Hears of duties that failed: a defect is a finding."""

        def failed(duty: str, code: str) -> None:
            self.trace.note(self.clock.now_s(), who, duty, code)
            if code == errors.Internal.name:
                self.ledger.fail("no defects", f"duty {duty} of {who} failed unexpectedly")

        return failed

    def observer(self, who: str) -> Observer:
        """Hears of calls that ended: a defect is a finding."""
        return Observer(self, who)

    # --- blocks

    def holders(self, name: BlockName) -> list[str]:
        """Nodes whose living process holds a block."""
        return [node_id for node_id, node in self.nodes.items() if node.alive and name in node.core.held]

    def any_block(self, rng: random.Random) -> BlockName:
        """A block to put or get. Tenants use the same keys, and never see each other's bytes."""
        return tenant_id(rng.choice(TENANTS)), rng.choice(self.keys)

    def cache_block(self, rng: random.Random) -> BlockName:
        """A block that may be removed and trimmed."""
        return tenant_id(rng.choice(TENANTS)), rng.choice(self.keys[len(self.keys) // 2 :])

    def tenant_name(self, name: BlockName) -> str:
        """A block's tenant by name."""
        return next(tenant for tenant in TENANTS if tenant_id(tenant) == name[0])

    async def read_block(
        self, who: str, node_id: str, name: BlockName, timeout_s: float, incarnation: int
    ) -> BlockName:
        """See `pool_client.read_block`."""
        return await pool_client.read_block(self, who, node_id, name, timeout_s, incarnation)

    def holds(self, name: str) -> bool:
        """Whether a candidate leads by its own clock, elected by a third party."""
        candidate = self.masters.get(name) or self.conductors.get(name)
        return candidate is not None and candidate.holds

    def living_nodes(self) -> list[SimNode]:
        """Nodes whose process runs."""
        return [node for node in self.nodes.values() if node.alive]

    # --- what masters believe

    def leader(self) -> SimMaster | None:
        """The master that leads in the newest term, if any does."""
        leading = [master for master in self.masters.values() if master.leads]
        return max(leading, key=lambda master: master.state.membership.term, default=None)

    def listed(self, master: SimMaster) -> set[tuple[str, BlockName]]:
        """What a leader's directory says."""
        state, found = master.state, set()
        names = {node.index: node.node_id for node in state.membership.nodes.values()}
        for tenant in map(tenant_id, TENANTS):
            places = state.directory.holders(tenant, self.known_keys)
            for key, holders in zip(self.known_keys, places, strict=True):
                found |= {(names.get(holder, f"?{holder}"), (tenant, key)) for holder in holders}
        return found

    def truth(self) -> set[tuple[str, BlockName]]:
        """What the nodes hold."""
        return {
            (node_id, name) for node_id, node in self.nodes.items() if node.alive for name in node.core.held
        }

    def all_names(self) -> Iterable[BlockName]:
        """Every block that a client may put."""
        return itertools.product(map(tenant_id, TENANTS), self.keys)


class Observer:
    """What `OpRunner` tells."""

    def __init__(self, world: World, who: str) -> None:
        self._world, self._who = world, who

    def call_finished(self, method: str, code: str, elapsed_s: float) -> None:
        if code == errors.Internal.name:
            self._world.ledger.fail("no defects", f"{method} of {self._who} failed unexpectedly")
