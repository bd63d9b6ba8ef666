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

from mooncache.conductor.core.policy.fleet import PREFILL, ROLES
from mooncache.simulate.cluster import EventKind, ScheduledEvent
from mooncache.simulate.decode import Batch
from mooncache.simulate.sim_request import FailureReason, SimOutcome, SimRequest, SimStage

if TYPE_CHECKING:
    from mooncache.simulate.node import SimNode
    from mooncache.simulate.prefilling import Prefilling
    from mooncache.simulate.scheduling import SimScheduler
    from mooncache.simulate.world import World

_DRAIN_POLL_S = 0.25


class FailureInjector:
    """Handlers of scheduled events and of role switches."""

    def __init__(
        self,
        world: World,
        scheduler: SimScheduler,
        prefilling: Prefilling,
        place: Callable[[SimRequest, frozenset[int]], None],
    ) -> None:
        self.world, self.scheduler, self.prefilling, self._place = world, scheduler, prefilling, place
        for event in world.cluster.events:
            world.push(event.at_s, self._handle, event)

    def _handle(self, event: ScheduledEvent) -> None:
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
        elif event.role is not None:
            self.switch(node, ROLES[event.role])

    # --- failures

    def fail(self, node: SimNode) -> None:
        """The instance is gone, with all that it held."""
        world = self.world
        node.alive = False
        world.book.set(node.name, ready=False)
        node.wipe(world.index)
        victims = [request for request in world.requests.values() if self._touches(request, node)]
        readers = [request for request in world.requests.values() if self._reads_from(request, node)]
        for request in victims:
            self._withdraw(request)
        batch = node.batch
        node.batch = Batch(batch.cost, batch.capacity_tokens, batch.sequences_max)
        node.batch.busy_s, node.batch.step, node.batch.tokens = batch.busy_s, batch.step, batch.tokens
        node.batch_version += 1
        node.queue.clear()
        node.ready.clear()
        node.computing, node.queued_s, node.chunk_from = None, 0.0, 0
        for request in readers:
            if request.state == SimStage.QUEUED:
                self._lose_source(request)
        for request in victims:
            self._retry(request, node)
        for other in world.nodes:
            self.prefilling.try_start(other)

    @staticmethod
    def _touches(request: SimRequest, node: SimNode) -> bool:
        row = node.row
        if request.state in (SimStage.QUEUED, SimStage.COMPUTING) and (
            request.prefill == row or row in request.members
        ):
            return True
        if request.state == SimStage.HANDOVER and request.stream is not None and request.prefill == row:
            return True  # the KV was not yet handed over
        return request.decode == row and SimStage.NEW < request.state < SimStage.OVER

    @staticmethod
    def _reads_from(request: SimRequest, node: SimNode) -> bool:
        return request.state == SimStage.QUEUED and any(node.nic_out in flow.links for flow in request.flows)

    def _withdraw(self, request: SimRequest) -> None:
        """Take a request off everything that it occupies."""
        world, choice = self.world, request.choice
        assert choice is not None, "only decided requests occupy anything"
        self._stop_reading(request)
        if request.stream is not None:
            world.record.totals.bytes_handed_over -= world.network.cancel(request.stream, world.now_s)
            request.stream = None
        for row in request.members or (request.prefill,):
            member = world.nodes[row]
            if request.state == SimStage.QUEUED:
                member.take_off(request, choice.compute_s)
            elif member.computing is request:
                member.computing = None
                if member.role == PREFILL or request.members:  # else it was the batch's time
                    member.busy_s += world.now_s - request.compute_from_s
                if member.alive and member.chunk_from:
                    member.chunk_from = 0
                    self.prefilling.decoding.wake(member)
        if request.state in (SimStage.QUEUED, SimStage.COMPUTING):
            self.prefilling.withdraw(request)
        if request.sequence is not None and request.state == SimStage.HANDOVER:
            waiting = world.nodes[request.decode].batch.waiting
            if request.sequence in waiting:
                waiting.remove(request.sequence)
        self.scheduler.ended(request)

    def _stop_reading(self, request: SimRequest) -> None:
        """Cancel its fetches and SSD reads; bytes that were not moved were not read."""
        world, totals = self.world, self.world.record.totals
        for flow in request.flows:
            left = world.network.cancel(flow, world.now_s)
            if len(flow.links) != 2:  # SSD alone, or SSD and both NICs
                totals.bytes_ssd -= left
            if len(flow.links) > 1:
                totals.bytes_fetched -= left
        request.flows = []

    def _retry(self, request: SimRequest, node: SimNode) -> None:
        """Place the request again, or let it break off."""
        world = self.world
        streaming = request.state == SimStage.DECODING
        request.state = SimStage.OVER
        self.prefilling.release_waiters(request, made=False)
        request.attempt += 1
        request.sequence = None
        if streaming or request.attempt > world.options.retries_max:
            del world.requests[request.index]
            request.attempt -= 1
            reason = FailureReason.BROKE_OFF if streaming else FailureReason.INSTANCE_FAILED
            world.record.over(request, SimOutcome.FAILED, world.now_s, reason)
            return
        world.record.totals.retries += 1
        self._place(request, frozenset({node.row}))

    def _lose_source(self, request: SimRequest) -> None:
        """Its source is gone: compute what is not here."""
        world = self.world
        self._stop_reading(request)
        request.fetched_tokens = 0
        request.planned = world.index.leading_on(request.blocks, request.prefill, 0)
        request.awaits = 0
        self.prefilling.be_ready(request)

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
        busy = not node.idle or any(request.decode == node.row for request in world.requests.values())
        if busy:
            world.push(world.now_s + _DRAIN_POLL_S, self._drained, node, role)
        else:
            world.push(world.now_s + world.cluster.roles.switch_s, self._switched, node, role)

    def _switched(self, node: SimNode, role: int) -> None:
        if not node.alive:
            return
        node.role, node.switching = role, False
        self.world.record.totals.role_switches += 1
        self.world.book.set(node.name, role=role, ready=True)
