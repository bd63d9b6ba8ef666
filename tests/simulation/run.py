"""One seed: trouble, then calm, and the invariants of both."""

from __future__ import annotations

import asyncio
import gc
import time
from collections import Counter
from dataclasses import dataclass, field

from mooncache.conductor.core.progress import Phase
from mooncache.conductor.core.records import EVENTS_MAX
from tests.simulation import faults, situations
from tests.simulation.channels import simulated
from tests.simulation.conductors import SimConductor
from tests.simulation.gateways import END_GRACE_S
from tests.simulation.ledger import BrokenInvariantError
from tests.simulation.planted import bug
from tests.simulation.scheduler import Scheduler
from tests.simulation.world import World

SETTLE_S = 60.0
_ENDS = {Phase.FINISHED, Phase.FAILED, Phase.ABORTED}
WHOLE_MAX_S = 20.0
LOAD_WHEN_WHOLE_S = 4.0
QUIET_S = 7.0
ENDS_HEARD_S = 1.5


@dataclass(slots=True)
class Outcome:
    """What one seed came to."""

    seed: int
    violation: BrokenInvariantError | None = None
    digest: str = ""
    simulated_s: float = 0.0
    cpu_s: float = 0.0
    callbacks: int = 0
    counts: Counter[str] = field(default_factory=Counter)
    coverage: Counter[tuple[str, str]] = field(default_factory=Counter)


def run_seed(seed: int, planted: str = "", *, lines: list[str] | None = None) -> Outcome:
    """Run one seed to its end, or to the first broken invariant. planted: a bug of `planted.py`."""
    began_s = time.process_time()
    loop = Scheduler(seed)
    outcome = Outcome(seed)
    collects = gc.isenabled()
    gc.disable()  # tasks of killed processes would end at any moment
    try:
        asyncio.set_event_loop(loop)
        with bug(planted):
            loop.run_until_complete(_live(seed, loop, outcome, lines))
    finally:
        asyncio.set_event_loop(None)
        loop.close()
        if collects:
            gc.enable()
    outcome.simulated_s, outcome.callbacks = loop.virtual_now_s, loop.callbacks
    outcome.cpu_s = time.process_time() - began_s
    return outcome


async def _live(seed: int, loop: Scheduler, outcome: Outcome, lines: list[str] | None) -> None:
    world = World(seed, loop)
    world.trace.lines = lines
    try:
        with simulated(world.network):
            world.build_pool()
            world.build_serving()
            await _until(world, faults.trouble(world))
            if met := situations.drawn(world):
                await _until(world, situations.meet(world, met))
            world.whole_since_s = world.clock.now_s()
            await _until(world, load_when_whole(world))
            world.calm = True
            await _until(world, quiet(world))
            await _until(world, settle(world))
    except BrokenInvariantError as violation:
        outcome.violation = violation
    except AssertionError as error:
        outcome.violation = BrokenInvariantError("own checks", str(error))
    outcome.digest, outcome.counts, outcome.coverage = (
        world.trace.digest(),
        world.ledger.counts,
        world.coverage,
    )
    await loop.end()
    world.over()


async def _until(world: World, work: object) -> None:
    """Do some work; the first broken invariant ends it."""
    task = asyncio.ensure_future(work)  # type: ignore[arg-type]
    while not task.done():
        await asyncio.wait({task}, timeout=0.5)
        for node in world.living_nodes():
            node.check()
        for part in (world.masters, world.conductors, world.gateways):
            for process in part.values():
                if not process.process.dead:
                    process.check()
        if world.ledger.broken is not None:
            task.cancel()
            raise world.ledger.broken
    task.result()


async def load_when_whole(world: World) -> None:
    """Clients of the pool go on until its directory is whole, and for a while after that.

    What goes wrong then is not mended by the next restart or election.
    """
    until_s = world.clock.now_s() + WHOLE_MAX_S
    while (leader := world.leader()) is None or leader.state.completeness() < 1.0:
        if world.clock.now_s() >= until_s:
            return  # `settle` says what is missing
        await world.clock.sleep(0.25)
    await world.clock.sleep(LOAD_WHEN_WHOLE_S)


async def quiet(world: World) -> None:
    """Requests go on for a while in a whole cluster: each of them is served, and the conductor hears of its end."""
    if not world.shape.serving:
        return
    await world.clock.sleep(QUIET_S)
    world.no_requests = True
    limit_s = world.config.gateway.request_timeout_s + END_GRACE_S
    until_s = world.clock.now_s() + limit_s
    while any(gateway.open for gateway in world.gateways.values()) and world.clock.now_s() < until_s:
        await world.clock.sleep(0.25)
    for gateway in world.gateways.values():
        for request_id in gateway.open:
            world.ledger.ended_late(gateway.name, request_id, limit_s)
    await world.clock.sleep(ENDS_HEARD_S)
    for conductor in world.conductors.values():  # standbys know what the leader knows
        work = conductor.state.core.work
        for tenant, request_id in world.calm_requests:
            if work.of_request(tenant, request_id) is not None:
                world.ledger.fail("ends are heard", f"{conductor.name} counts {request_id}, which has ended")
        for gateway in world.gateways.values():  # of requests in the time of trouble, too
            counted = [name for name in gateway.ended_decisions if work.get(name) is not None]
            if counted:
                text = f"{conductor.name} counts {counted[0]}, whose end {gateway.name} has reported"
                world.ledger.fail("reports arrive", text)
            unheard = [name for name in gateway.ended_decisions if not _heard(conductor, name)]
            if unheard and world.shape.conductors == 1:  # of several, one may take a report with it
                text = f"{conductor.name} has no word of the end of {unheard[0]} from {gateway.name}"
                world.ledger.fail("reports arrive", text)


def _heard(conductor: SimConductor, decision_id: str) -> bool:
    """Whether the record of a decision has its end, if this process of the conductor keeps one."""
    record = conductor.state.core.records.find(decision_id)
    if record is None or len(record.events) >= EVENTS_MAX:
        return True
    return any(event["phase"] in _ENDS for event in record.reported())


async def settle(world: World) -> None:
    """Everything is whole again: what has to be true soon."""
    until_s = world.clock.now_s() + SETTLE_S
    while (why := _unsettled_pool(world) or _unsettled_serving(world)) and world.clock.now_s() < until_s:
        await world.clock.sleep(0.5)
    if why:
        world.ledger.fail(*why)


def _unsettled_serving(world: World) -> tuple[str, str] | None:
    """What is not yet as it has to be of conductors, engines and gateways."""
    if not world.shape.serving:
        return None
    leaders = [conductor for conductor in world.conductors.values() if conductor.leads]
    if len(leaders) != 1:
        return "one conductor leads", f"{len(leaders)} conductors lead"
    leader = leaders[0]
    core = leader.state.core
    known = {instance.info.instance_id for instance in core.registry}
    if known != set(world.engines):
        return "instances are known", f"{leader.name} knows {sorted(known)}"
    for conductor in world.conductors.values():
        core = conductor.state.core
        if len(core.work) or any(core.assigned(instance) for instance in core.registry):
            return "load books return to zero", f"{conductor.name} counts {len(core.work)} requests"
    working = [name for name, engine in world.engines.items() if engine.open]
    if working:
        return "engines stop with their requests", f"{', '.join(working)} work for requests that have ended"
    for gateway in world.gateways.values():
        if {
            one.instance_id for model in gateway.state.fleet.models.values() for one in model.instances
        } != known:
            return "instances are known", f"{gateway.name} does not know all of them"
    return None


def _unsettled_pool(world: World) -> tuple[str, str] | None:
    """What is not yet as it has to be of masters and nodes."""
    leader = world.leader()
    if leader is None:
        return "directory converges", "no master leads"
    state = leader.state
    living = world.living_nodes()
    if state.completeness() < 1.0 or any(node.node_id not in state.membership.nodes for node in living):
        return "directory converges", f"reports are missing: completeness {state.completeness():.2f}"
    listed, truth = world.listed(leader), world.truth()
    if listed != truth:
        text = f"{len(listed - truth)} listed and not held, {len(truth - listed)} held and not listed"
        return "directory converges", text
    for node in living:
        if node.core.reserved:
            return "reservations end", f"{node.node_id} keeps {len(node.core.reserved)} reservations"
    return _short_of_copies(world)


def _short_of_copies(world: World) -> tuple[str, str] | None:
    """A durable block with one copy gets its second one, where there is room for it."""
    nodes = world.living_nodes()
    room = world.shape.extents * len(nodes)
    blocks = {name for node in nodes for name in node.core.held}
    if (
        world.shape.replicas < 2
        or len(nodes) < 2
        or room < 4 * len(blocks)
        or world.shape.quotas
        or world.disks_lied
    ):
        return None
    if any(node.state.draining for node in nodes):
        return None
    short = [name for name in blocks if len(world.holders(name)) < 2]
    return ("copies are made again", f"{len(short)} blocks have one copy") if short else None
