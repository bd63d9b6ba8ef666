"""Faults drawn from the seed, one after the other, and the phases of the cluster in which they hit."""

from __future__ import annotations

import random
from collections.abc import Awaitable, Callable, Iterable
from typing import TYPE_CHECKING

from mooncache.testing.memory_channel import NetworkFaults

if TYPE_CHECKING:
    from tests.simulation.world import World

Fault = Callable[["World", random.Random], Awaitable[bool]]
FAULTS: dict[str, tuple[float, Fault]] = {}
"""Name -> weight, and what does it; it says whether there was anything to hit."""
AGAIN = 0.35
"""How often a fault hits the process that the one before has hit."""
OF_SERVING_FAULTS = {"crash_conductor", "crash_engine", "crash_worker", "crash_gateway"}


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
    living = world.living_nodes()
    if any(node.state.planner.reporting_full for node in living):
        return "full report"
    if state.completeness() < 1.0 or any(node.node_id not in state.membership.nodes for node in living):
        return "rebuild"
    if any(not task.over for task in state.tasks.tasks.values()):
        return "copying"
    return "steady"


async def trouble(world: World) -> None:
    """Faults until the seed's time is over; then everything is whole again."""
    rng = random.Random(f"faults {world.seed}")
    until_s = world.clock.now_s() + world.shape.trouble_s
    possible = sorted(kind for kind in FAULTS if world.shape.serving or kind not in OF_SERVING_FAULTS)
    kinds = rng.sample(possible, rng.randrange(2, len(possible)))  # every seed has its own mixture
    weights = [FAULTS[kind][0] for kind in kinds]
    await world.clock.sleep(rng.choice([0.2, 2.0, 4.0]))
    while world.clock.now_s() < until_s:
        (kind,) = rng.choices(kinds, weights)
        hit_in = phase(world)
        world.trace.note(world.clock.now_s(), "fault", kind)
        if await FAULTS[kind][1](world, rng):
            world.coverage[kind, hit_in] += 1
        await world.clock.sleep(rng.choice([0.0, 0.2, 0.6, 1.5, 3.0]))
    heal(world)


def heal(world: World) -> None:
    """The network is whole, every process runs, and clocks are right."""
    world.network.heal()
    world.network.faults = NetworkFaults()
    world.network.slow_links.clear()
    world.elections.heal()
    for process in list(world.processes.values()):
        process.go_on()
        process.wall_offset_s = 0.0
    world.revive()


@fault(3)
async def bad_network(world: World, rng: random.Random) -> bool:
    """Messages are lost, late and repeated for a while."""
    world.network.faults = NetworkFaults(
        loss=rng.uniform(0.0, 0.25),
        duplicate=rng.uniform(0.0, 0.3),
        delay_max_s=rng.choice([0.002, 0.05, 0.3]),
        slow=rng.uniform(0.0, 0.1),
        slow_delay_s=rng.choice([0.5, 2.0, 8.0]),
    )
    return True


@fault(2)
async def good_network(world: World, _rng: random.Random) -> bool:
    """Links and messages are as they should be."""
    world.network.heal()
    world.network.faults = NetworkFaults()
    world.network.slow_links.clear()
    world.elections.heal()
    return True


@fault(2)
async def cut(world: World, rng: random.Random) -> bool:
    """One process is cut off from all others."""
    name = pick(world, rng, world.processes)
    world.network.partition({name}, set(world.processes) - {name})
    if rng.random() < 0.5:
        world.elections.cut.add(name)
    return True


@fault(2)
async def flap(world: World, rng: random.Random) -> bool:
    """A store node and the masters do not hear each other, for less than the time after which it counts as dead."""
    name, masters = pick(world, rng, world.nodes), set(world.masters)
    world.network.partition({name}, masters)
    world.later(rng.choice([0.8, 1.6, 3.0]), lambda: world.network.rejoin({name}, masters))
    return True


@fault(2)
async def one_way(world: World, rng: random.Random) -> bool:
    """A process is heard and does not hear, or the other way round."""
    name, others = pick(world, rng, world.processes), sorted(world.processes)
    for other in rng.sample(others, rng.randrange(1, len(others))):
        pair = (name, other) if rng.random() < 0.5 else (other, name)
        world.network.block(*pair, both_ways=False)
    return True


@fault(1)
async def slow_link(world: World, rng: random.Random) -> bool:
    """The data plane of a process is slow."""
    world.network.slow_links[pick(world, rng, world.processes)] = rng.choice([0.1, 0.5, 1.5])
    return True


@fault(2)
async def coordination_silent(world: World, rng: random.Random) -> bool:
    """Some candidates do not reach the coordination, or their calls are carried out and they do not hear of it."""
    deaf = rng.choice([world.elections.cut, world.elections.mute])
    deaf |= {name for name in sorted({*world.masters, *world.conductors}) if rng.random() < 0.7}
    return bool(deaf)


@fault(1.5)
async def coordination_slow(world: World, rng: random.Random) -> bool:
    """What carries the elections does at once what it is asked, and its answers to some candidates are late."""
    for name in sorted(world.candidates):
        if rng.random() < 0.5:
            world.elections.late_s[name] = rng.choice([0.8, 1.3])
    return bool(world.elections.late_s)


@fault(2)
async def unrenewed(world: World, rng: random.Random) -> bool:
    """A leader hears late that its renewal was carried out, and then it is stopped, or nothing of it arrives."""
    leaders = [name for name in sorted(world.candidates) if world.processes.get(name) and world.holds(name)]
    if not leaders:
        return False
    name = rng.choice(leaders)
    world.elections.late_s[name] = 1.3
    await world.clock.sleep(rng.uniform(1.4, 4.2))
    if rng.random() < 0.5:
        world.elections.cut.add(name)
    else:
        process = world.processes[name]
        process.stop()
        world.later(rng.choice([3.0, 4.5]), process.go_on)
    return True


@fault(3)
async def crash_master(world: World, rng: random.Random) -> bool:
    """A master is killed, and started again after a while."""
    return _crash(world, rng, pick(world, rng, world.masters))


@fault(3)
async def crash_node(world: World, rng: random.Random) -> bool:
    """A store node is killed; a disk keeps its blocks."""
    return _crash(world, rng, pick(world, rng, world.nodes))


@fault(2)
async def lose_node(world: World, rng: random.Random) -> bool:
    """A host is gone for good, its disks with it; one for each seed, and not the last two."""
    if world.gone or len(world.living_nodes()) <= 2:
        return False
    node = rng.choice(world.living_nodes())
    world.gone.add(node.node_id)
    node.power_off(keeps=False)
    return True


@fault(1)
async def lying_disk(world: World, rng: random.Random) -> bool:
    """A disk says that it has written what it has not; the next start of its node shows it."""
    if not world.shape.disks:
        return False
    world.nodes[pick(world, rng, world.nodes)].lies = world.disks_lied = True
    return True


@fault(1.5)
async def crash_client(world: World, rng: random.Random) -> bool:
    """A client of the pool is killed in whatever it does."""
    return _crash(world, rng, pick(world, rng, world.clients))


@fault(3)
async def crash_conductor(world: World, rng: random.Random) -> bool:
    """A conductor is killed."""
    return _crash(world, rng, pick(world, rng, world.conductors))


@fault(2)
async def crash_engine(world: World, rng: random.Random) -> bool:
    """An engine dies under its requests; its worker goes on."""
    return _crash(world, rng, pick(world, rng, world.engines))


@fault(1)
async def crash_worker(world: World, rng: random.Random) -> bool:
    """A worker dies; its engine goes on here."""
    return _crash(world, rng, pick(world, rng, world.workers))


@fault(1)
async def crash_gateway(world: World, rng: random.Random) -> bool:
    """A gateway dies with its requests."""
    return _crash(world, rng, pick(world, rng, world.gateways))


@fault(3)
async def stop(world: World, rng: random.Random) -> bool:
    """SIGSTOP for a while."""
    process = world.processes[pick(world, rng, world.processes)]
    process.stop()
    world.later(rng.choice([0.1, 1.0, 2.5, 5.0, 9.0]), process.go_on)
    return not process.dead


@fault(3)
async def stop_leader(world: World, rng: random.Random) -> bool:
    """The leading master is stopped for longer than its lease, and goes on where it was."""
    leader = world.leader()
    if leader is None:
        return False
    leader.process.stop()
    world.later(rng.choice([3.0, 4.5, 7.0]), leader.process.go_on)
    return True


@fault(1)
async def clock_jump(world: World, rng: random.Random) -> bool:
    """The wall clock of a host is set."""
    process = world.processes[pick(world, rng, world.processes)]
    process.wall_offset_s += rng.choice([-3600.0, -5.0, 5.0, 86_400.0])
    return not process.dead


def pick(world: World, rng: random.Random, names: Iterable[str]) -> str:
    """One of several processes: often the one that the last fault hit, because faults that coincide find more."""
    possible = sorted(names)
    if world.victim not in possible or rng.random() >= AGAIN:
        world.victim = rng.choice(possible)
    return world.victim


def _crash(world: World, rng: random.Random, name: str) -> bool:
    if world.processes[name].dead:
        return False
    world.crash(name)
    world.later(rng.choice([0.0, 0.0, 0.3, 1.0, 5.0, 8.0]), lambda: world.restart(name))
    return True
