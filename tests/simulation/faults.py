"""Faults drawn from the seed, one after the other, and the phases of the cluster in which they hit."""

from __future__ import annotations

import random
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING

from mooncache.testing.memory_channel import NetworkFaults

if TYPE_CHECKING:
    from tests.simulation.world import World

Fault = Callable[["World", random.Random], Awaitable[None]]
FAULTS: dict[str, tuple[float, Fault]] = {}
"""Name -> weight, and what does it."""
_OF_SERVING = {"crash_conductor", "crash_engine", "crash_worker", "crash_gateway"}


def fault(weight: float) -> Callable[[Fault], Fault]:
    """A fault of the list."""

    def keep(work: Fault) -> Fault:
        FAULTS[work.__name__] = weight, work
        return work

    return keep


def phase(world: World) -> str:
    """What the cluster is doing now."""
    leader = world.leader()
    if leader is None:
        return "election"
    state = leader.state
    if any(node.state.planner.reporting_full for node in world.nodes.values() if node.alive):
        return "full report"
    if state.completeness() < 1.0 or len(state.membership.nodes) < len(world.nodes):
        return "rebuild"
    if any(not task.over for task in state.tasks.tasks.values()):
        return "copying"
    return "steady"


async def trouble(world: World) -> None:
    """Faults until the seed's time is over; then everything is whole again."""
    rng = random.Random(f"faults {world.seed}")
    until_s = world.clock.now_s() + world.shape.trouble_s
    possible = sorted(kind for kind in FAULTS if world.shape.serving or kind not in _OF_SERVING)
    kinds = rng.sample(possible, rng.randrange(2, len(possible)))  # every seed has its own mixture
    weights = [FAULTS[kind][0] for kind in kinds]
    await world.clock.sleep(rng.choice([0.2, 2.0, 4.0]))
    while world.clock.now_s() < until_s:
        (kind,) = rng.choices(kinds, weights)
        world.coverage[kind, phase(world)] += 1
        world.trace.note(world.clock.now_s(), "fault", kind)
        await FAULTS[kind][1](world, rng)
        await world.clock.sleep(rng.choice([0.0, 0.2, 0.6, 1.5, 3.0]))
    heal(world)


def heal(world: World) -> None:
    """The network is whole, every process runs, and clocks are right."""
    world.network.heal()
    world.network.faults = NetworkFaults()
    world.network.slow_links.clear()
    world.etcd.cut.clear()
    for process in list(world.processes.values()):
        process.go_on()
        process.wall_offset_s = 0.0
    world.revive()


@fault(3)
async def bad_network(world: World, rng: random.Random) -> None:
    """Messages are lost, late and repeated for a while."""
    world.network.faults = NetworkFaults(
        loss=rng.uniform(0.0, 0.25),
        duplicate=rng.uniform(0.0, 0.3),
        delay_max_s=rng.choice([0.002, 0.05, 0.3]),
        slow=rng.uniform(0.0, 0.1),
        slow_delay_s=rng.choice([0.5, 2.0, 8.0]),
    )


@fault(2)
async def good_network(world: World, _rng: random.Random) -> None:
    """Links and messages are as they should be."""
    world.network.heal()
    world.network.faults = NetworkFaults()
    world.network.slow_links.clear()
    world.etcd.cut.clear()


@fault(2)
async def cut(world: World, rng: random.Random) -> None:
    """One process is cut off from all others."""
    name = rng.choice(sorted(world.processes))
    world.network.partition({name}, set(world.processes) - {name})
    if rng.random() < 0.5:
        world.etcd.cut.add(name)


@fault(2)
async def one_way(world: World, rng: random.Random) -> None:
    """A process is heard and does not hear, or the other way round."""
    name, others = rng.choice(sorted(world.processes)), sorted(world.processes)
    for other in rng.sample(others, rng.randrange(1, len(others))):
        pair = (name, other) if rng.random() < 0.5 else (other, name)
        world.network.block(*pair, both_ways=False)


@fault(1)
async def slow_link(world: World, rng: random.Random) -> None:
    """The data plane of a process is slow."""
    world.network.slow_links[rng.choice(sorted(world.processes))] = rng.choice([0.1, 0.5, 1.5])


@fault(2)
async def etcd_silent(world: World, rng: random.Random) -> None:
    """Some masters do not reach the coordination."""
    world.etcd.cut |= {name for name in sorted(world.masters) if rng.random() < 0.7}


@fault(3)
async def crash_master(world: World, rng: random.Random) -> None:
    """A master is killed, and started again after a while."""
    await _crash(world, rng, rng.choice(sorted(world.masters)))


@fault(3)
async def crash_node(world: World, rng: random.Random) -> None:
    """A store node is killed; a disk keeps its blocks."""
    await _crash(world, rng, rng.choice(sorted(world.nodes)))


@fault(1)
async def lying_disk(world: World, rng: random.Random) -> None:
    """A disk says that it has written what it has not; the next start of its node shows it."""
    if world.shape.disks:
        rng_node = world.nodes[rng.choice(sorted(world.nodes))]
        rng_node.lies = world.disks_lied = True


@fault(1.5)
async def crash_client(world: World, rng: random.Random) -> None:
    """A client of the pool is killed in whatever it does."""
    await _crash(world, rng, rng.choice(sorted(world.clients)))


@fault(3)
async def crash_conductor(world: World, rng: random.Random) -> None:
    """A conductor is killed."""
    await _crash(world, rng, rng.choice(sorted(world.conductors)))


@fault(2)
async def crash_engine(world: World, rng: random.Random) -> None:
    """An engine dies under its requests; its worker goes on."""
    await _crash(world, rng, rng.choice(sorted(world.engines)))


@fault(1)
async def crash_worker(world: World, rng: random.Random) -> None:
    """A worker dies; its engine goes on here."""
    await _crash(world, rng, rng.choice(sorted(world.workers)))


@fault(1)
async def crash_gateway(world: World, rng: random.Random) -> None:
    """A gateway dies with its requests."""
    await _crash(world, rng, rng.choice(sorted(world.gateways)))


@fault(3)
async def stop(world: World, rng: random.Random) -> None:
    """SIGSTOP for a while."""
    process = world.processes[rng.choice(sorted(world.processes))]
    process.stop()
    world.later(rng.choice([0.1, 1.0, 2.5, 5.0, 9.0]), process.go_on)


@fault(3)
async def stop_leader(world: World, rng: random.Random) -> None:
    """The leading master is stopped for longer than its lease, and goes on where it was."""
    leader = world.leader()
    if leader is not None:
        leader.process.stop()
        world.later(rng.choice([3.0, 4.5, 7.0]), leader.process.go_on)


@fault(1)
async def clock_jump(world: World, rng: random.Random) -> None:
    """The wall clock of a host is set."""
    process = world.processes[rng.choice(sorted(world.processes))]
    process.wall_offset_s += rng.choice([-3600.0, -5.0, 5.0, 86_400.0])


async def _crash(world: World, rng: random.Random, name: str) -> None:
    if world.processes[name].dead:
        return
    world.crash(name)
    world.later(rng.choice([0.0, 0.0, 0.3, 1.0, 5.0, 8.0]), lambda: world.restart(name))
