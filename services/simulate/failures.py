"""What happens to instances while requests run: failures, joins, changes of role.

A failed instance loses its memory and everything under way on it. Requests whose prompt was waiting, being
computed or handed over are decided anew, elsewhere, within the budget of retries; those that were already
streaming to a client break off. A change of role first drains: no new work, what is there ends, then the switch
takes its time; blocks in memory stay.
Invariant: every request that leaves an instance here ends exactly once, or is placed again.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

from mooncache.conductor.core.policy.fleet import BOTH, DECODE, PREFILL
from mooncache.simulate.cluster import ROLES, EventKind, ScheduledEvent
from mooncache.simulate.decode import Batch
from mooncache.simulate.sim_request import SimOutcome, SimRequest, SimStage

if TYPE_CHECKING:
    from mooncache.simulate.node import SimNode
    from mooncache.simulate.prefilling import Prefilling
    from mooncache.simulate.scheduling import SimScheduler
    from mooncache.simulate.world import World

_DRAIN_POLL_S = 0.25


class FailureInjector:
    """Handlers of scheduled happenings and of role switches."""

    def __init__(
        self,
        world: World,
        scheduler: SimScheduler,
        prefilling: Prefilling,
        place: Callable[[SimRequest, frozenset[int]], None],
    ) -> None:
        self.world, self.scheduler, self.prefilling, self._place = world, scheduler, prefilling, place
        for event in world.cluster.events:
            world.push(event.at_s, self._happen, event)

    def _happen(self, event: ScheduledEvent) -> None:
        world = self.world
        if event.kind == EventKind.JOIN:
            group = next(group for group in world.cluster.instances if group.label == event.instance)
            number = sum(1 for node in world.nodes if node.group.label == group.label)
            world.add_node(f"{group.label}-{number}", replace(group, pipeline_size=1))
            return
        node = world.nodes[world.row_of[event.instance]]
        if not node.alive:
            return
        if event.kind == EventKind.FAIL:
            self.fail(node)
        else:
            self.switch(node, ROLES[event.role])

    # --- failures

    def fail(self, node: SimNode) -> None:
        """The instance is gone, with all that it held."""
        world = self.world
        node.alive = False
        world.book.set(node.name, ready=False)
        node.wipe(world.index)
        victims = [life for life in world.lives.values() if self._touches(life, node)]
        readers = [life for life in world.lives.values() if self._reads_from(life, node)]
        for life in victims:
            self._withdraw(life)
        batch = node.batch
        node.batch = Batch(batch.cost, batch.capacity_tokens, batch.sequences_max)
        node.batch.busy_s, node.batch.step, node.batch.tokens = batch.busy_s, batch.step, batch.tokens
        node.batch_version += 1
        node.queue.clear()
        node.ready.clear()
        node.computing, node.queued_s, node.chunk_from = None, 0.0, 0
        for life in readers:
            if life.state == SimStage.QUEUED:
                self._read_in_vain(life)
        for life in victims:
            self._again(life, node)
        for other in world.nodes:
            self.prefilling.try_start(other)

    @staticmethod
    def _touches(life: SimRequest, node: SimNode) -> bool:
        row = node.row
        if life.state in (SimStage.QUEUED, SimStage.COMPUTING) and (
            life.prefill == row or row in life.members
        ):
            return True
        if life.state == SimStage.HANDOVER and life.stream is not None and life.prefill == row:
            return True  # the KV was not yet handed over
        return life.decode == row and SimStage.NEW < life.state < SimStage.OVER

    @staticmethod
    def _reads_from(life: SimRequest, node: SimNode) -> bool:
        return life.state == SimStage.QUEUED and any(node.nic_out in flow.links for flow in life.flows)

    def _withdraw(self, life: SimRequest) -> None:
        """Take a request off everything that it occupies."""
        world, choice = self.world, life.choice
        assert choice is not None, "only decided requests occupy anything"
        self._stop_reading(life)
        if life.stream is not None:
            world.record.totals.bytes_handed_over -= world.network.cancel(life.stream, world.now_s)
            life.stream = None
        for row in life.members or (life.prefill,):
            member = world.nodes[row]
            if life.state == SimStage.QUEUED:
                member.take_off(life, choice.compute_s)
            elif member.computing is life:
                member.computing = None
                if member.role == PREFILL or life.members:  # else it was the batch's time
                    member.busy_s += world.now_s - life.compute_from_s
                if member.alive and member.chunk_from:
                    member.chunk_from = 0
                    self.prefilling.decoding.wake(member)
        if life.state in (SimStage.QUEUED, SimStage.COMPUTING):
            self.prefilling.withdraw(life)
        if life.sequence is not None and life.state == SimStage.HANDOVER:
            waiting = world.nodes[life.decode].batch.waiting
            if life.sequence in waiting:
                waiting.remove(life.sequence)
        self.scheduler.ended(life)

    def _stop_reading(self, life: SimRequest) -> None:
        """Cancel its fetches and SSD reads; bytes that were not moved were not read."""
        world, totals = self.world, self.world.record.totals
        for flow in life.flows:
            left = world.network.cancel(flow, world.now_s)
            if len(flow.links) != 2:  # SSD alone, or SSD and both NICs
                totals.bytes_ssd -= left
            if len(flow.links) > 1:
                totals.bytes_fetched -= left
        life.flows = []

    def _again(self, life: SimRequest, node: SimNode) -> None:
        """Place the request again, or let it break off."""
        world = self.world
        streaming = life.state == SimStage.DECODING
        life.state = SimStage.OVER
        self.prefilling.release_waiters(life, made=False)
        life.attempt += 1
        life.sequence = None
        if streaming or life.attempt > world.options.retries_max:
            del world.lives[life.index]
            life.attempt -= 1
            world.record.over(
                life, SimOutcome.FAILED, world.now_s, "broke_off" if streaming else "instance_failed"
            )
            return
        world.record.totals.retries += 1
        self._place(life, frozenset({node.row}))

    def _read_in_vain(self, life: SimRequest) -> None:
        """Its source is gone: compute what is not here."""
        world = self.world
        self._stop_reading(life)
        life.fetched_tokens = 0
        life.planned = world.index.leading_on(life.blocks, life.prefill, 0)
        life.awaits = 0
        self.prefilling.be_ready(life)

    # --- roles

    def switch(self, node: SimNode, role: int) -> None:
        """Drain the instance, then give it another role."""
        if node.switching or node.role == role:
            return
        node.switching = True
        self.world.book.set(node.name, ready=False)
        self._drained(node, role)

    def _drained(self, node: SimNode, role: int) -> None:
        world = self.world
        if not node.alive:
            return
        busy = not node.idle or any(life.decode == node.row for life in world.lives.values())
        if busy:
            world.push(world.now_s + _DRAIN_POLL_S, self._drained, node, role)
        else:
            world.push(world.now_s + world.cluster.roles.switch_s, self._switched, node, role)

    def _switched(self, node: SimNode, role: int) -> None:
        if not node.alive:
            return
        assert role in (PREFILL, DECODE, BOTH), "roles are numbers of the fleet"
        node.role, node.switching = role, False
        self.world.record.totals.role_switches += 1
        self.world.book.set(node.name, role=role, ready=True)
