"""Situations that chance hardly brings about: some seeds meet one, when the cluster has just become whole.

A fault hits whatever is going on; here one waits for the moment in which it matters. Nothing else goes wrong
meanwhile and nothing after it, so what it breaks is not mended by the next restart. Which seeds meet which is drawn
apart from everything else: the others are the same runs as without this module.
"""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

from mooncache.store_node.core.report_planner import ReportKind
from tests.simulation.elections import LEASE_S
from tests.simulation.faults import Fault, heal, phase

if TYPE_CHECKING:
    from tests.simulation.nodes import SimNode
    from tests.simulation.world import World

SHARE = 0.5
"""How many seeds meet one."""
SITUATIONS: dict[str, Fault] = {}
"""Name -> what brings it about; it says whether it came about."""
_OF_ETCD = "lease_ends_in_campaign"
_LEADER_KEY = b"/masters/leader"
_WHOLE_MAX_S = 20.0
_MOMENT_S = 0.0005


def situation(work: Fault) -> Fault:
    """A situation of the list."""
    SITUATIONS[work.__name__] = work
    return work


def drawn(world: World) -> str:
    """The situation that a seed meets, one that its cluster can meet; "" for none."""
    rng = random.Random(f"situation {world.seed}")
    if rng.random() >= SHARE:
        return ""
    return rng.choice([name for name in sorted(SITUATIONS) if name != _OF_ETCD or _has_etcd(world)])


async def meet(world: World, name: str) -> None:
    """Wait until the cluster is whole, bring the situation about, and make all whole again."""
    until_s = world.clock.now_s() + _WHOLE_MAX_S
    while (leader := world.leader()) is None or leader.state.completeness() < 1.0:
        if world.clock.now_s() >= until_s:
            return  # `settle` says what is missing
        await world.clock.sleep(0.25)
    await world.clock.sleep(1.0)
    hit_in = phase(world)
    world.trace.note(world.clock.now_s(), "situation", name)
    if await SITUATIONS[name](world, random.Random(f"in situation {world.seed}")):
        world.coverage[name, hit_in] += 1
    heal(world)


@situation
async def report_ends_unheard(world: World, rng: random.Random) -> bool:
    """A node that has just started reports its blocks, and does not hear that the report has ended."""
    node, masters = _drawn_node(world, rng), set(world.masters)
    world.crash(node.node_id)
    world.restart(node.node_id)
    until_s = world.clock.now_s() + 6.0
    while world.clock.now_s() < until_s:
        pending = node.state.planner._pending
        if pending is not None and pending.kind is ReportKind.FULL_END:
            break
        await world.clock.sleep(_MOMENT_S)
    else:
        return False
    for master in sorted(masters):
        world.network.block(master, node.node_id, both_ways=False)
    await world.clock.sleep(rng.uniform(1.6, 2.4))  # longer than the call waits for its answer
    world.network.rejoin({node.node_id}, masters)
    return True


@situation
async def another_life_unknown(world: World, rng: random.Random) -> bool:
    """A node starts again at once and the masters do not hear of it: their commands are for its former process."""
    node, masters = _drawn_node(world, rng), set(world.masters)
    for master in sorted(masters):
        world.network.block(node.node_id, master, both_ways=False)
    world.crash(node.node_id)
    world.restart(node.node_id)
    await world.clock.sleep(rng.choice([1.6, 3.0]))
    world.network.rejoin({node.node_id}, masters)
    return True


@situation
async def host_lost_at_last(world: World, rng: random.Random) -> bool:
    """One more host is lost for good with what it holds, and the master that leads goes on."""
    living = world.living_nodes()
    if len(living) < 2:
        return False
    node = rng.choice(living)
    world.gone.add(node.node_id)
    node.power_off(keeps=False)
    return True


@situation
async def lease_ends_in_campaign(world: World, rng: random.Random) -> bool:
    """The leader's key in etcd ends, and every candidate sees it and is stopped for longer than its own lease."""
    leader = world.leader()
    if leader is None:
        return False
    for name in sorted(world.masters):
        world.elections.late_s[name] = 1.3
    world.crash(leader.name)
    world.restart(leader.name)
    until_s = world.clock.now_s() + 2 * LEASE_S
    while _LEADER_KEY in world.elections.etcd._pairs and world.clock.now_s() < until_s:
        await world.clock.sleep(0.01)
    await world.clock.sleep(rng.uniform(0.8, 2.2))
    for name in sorted(world.masters):
        process = world.processes[name]
        process.stop()
        world.later(LEASE_S + rng.uniform(0.5, 1.5), process.go_on)
    await world.clock.sleep(LEASE_S + 2.0)
    return True


def _has_etcd(world: World) -> bool:
    return world.shape.masters_elect == "etcd"


def _drawn_node(world: World, rng: random.Random) -> SimNode:
    return rng.choice(world.living_nodes())
