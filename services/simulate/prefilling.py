"""Prompts: fetching the prefix, waiting in line, being computed, and streaming the KV to the decode instance.

An instance computes one prompt at a time, the first of those whose prefix is there; fetches and waits overlap with
the queue. What it really holds when it begins decides what it computes, so a prefix that came meanwhile is used.
While it computes, layers stream to the decode instance as fast as they are made; the rest follows at the end.
A pipeline of instances begins a prompt when all of its members have come to it.
"""

from __future__ import annotations

import heapq
from functools import partial
from typing import TYPE_CHECKING

from mooncache.conductor.core.policy import pipeline
from mooncache.conductor.core.policy.fleet import PREFILL
from mooncache.conductor.core.policy.types import Branch
from mooncache.simulate.cluster import FirstToken, PoolScope
from mooncache.simulate.sim_request import SimRequest, SimStage

if TYPE_CHECKING:
    from mooncache.simulate.decoding import Decoding
    from mooncache.simulate.network import Flow
    from mooncache.simulate.node import SimNode
    from mooncache.simulate.scheduling import SimScheduler
    from mooncache.simulate.world import World

_JUST_IN_TIME = 1 + 1e-9  # a stream that nothing holds up ends with its prompt, not a rounding error later


class Prefilling:
    """Handlers of everything that happens to a prompt until it is computed."""

    def __init__(self, world: World, scheduler: SimScheduler, decoding: Decoding) -> None:
        self.world, self.scheduler, self.decoding = world, scheduler, decoding
        self._block_tokens = world.trace.block_tokens

    # --- coming in

    def enqueue(self, request: SimRequest) -> None:
        """The decision is made: fetch, wait and queue, all at once."""
        world, choice = self.world, request.choice
        assert choice is not None, "only decided requests are queued"
        inline = choice.prefill < 0
        request.prefill = choice.decode if inline else choice.prefill
        request.decode = choice.decode
        request.members = choice.members if len(choice.members) > 1 else ()
        request.state = SimStage.QUEUED
        request.order = world.order = world.order + 1
        request.planned_from_s = world.now_s
        request.expected_s = world.now_s + choice.ttft_s
        request.awaits, request.ready, request.flows = 0, False, []
        request.fetch_s, request.fetched_tokens = 0.0, 0
        prefix = min(choice.prefix_tokens, request.input_tokens)
        request.planned = self._whole_blocks(prefix, request)
        for row in request.members or (request.prefill,):
            world.nodes[row].enqueue(request, choice.compute_s)
        self._announce(request)
        node = world.nodes[request.prefill]
        maker = world.requests.get(int(choice.awaited.decision_id)) if choice.awaited is not None else None
        if (
            choice.branch is Branch.WAIT
            and maker is not None
            and maker.state in (SimStage.QUEUED, SimStage.COMPUTING)
        ):
            request.awaits += 1
            maker.waiters.append(request)
        elif choice.branch is Branch.FETCH and choice.fetch_tokens > 0:
            self._fetch(request, choice.source_row, choice.fetch_tokens)
        elif choice.branch is Branch.WAIT:
            request.planned = 0
        if choice.branch is Branch.LOCAL:
            self._read_ssd(request, node, 0, request.planned)
        if request.awaits == 0:
            self.be_ready(request)

    def _whole_blocks(self, tokens: int, request: SimRequest) -> int:
        """Blocks that hold so many leading tokens; the last of a prompt may be partial."""
        return len(request.blocks) if tokens >= request.input_tokens else tokens // self._block_tokens

    def _announce(self, request: SimRequest) -> None:
        """Say which blocks this request is going to compute, unless another one is at it."""
        inflight = self.world.inflight
        request.inflight_from = request.planned
        for block in request.blocks[request.planned :]:
            inflight.setdefault(block, request)

    def withdraw(self, request: SimRequest) -> None:
        """What it announced is there now, or never will be by it."""
        inflight = self.world.inflight
        for block in request.blocks[request.inflight_from :]:
            if inflight.get(block) is request:
                del inflight[block]

    def _fetch(self, request: SimRequest, source_row: int, tokens: int) -> None:
        """Read the part of the prefix that is missing here from another node."""
        world = self.world
        if source_row < 0 or source_row == request.prefill or not world.nodes[source_row].alive:
            request.planned = 0
            return
        node, source = world.nodes[request.prefill], world.nodes[source_row]
        kv_bytes = source.profile.kv_bytes_per_token
        begin = max(0, request.planned - -(-tokens // self._block_tokens))
        on_ssd = source.on_ssd(request.blocks, begin, request.planned)
        ssd_tokens = min(tokens, on_ssd * self._block_tokens)
        if ssd_tokens:
            links = (source.ssd_read, source.nic_out, node.nic_in)
            request.flows.append(world.send(links, ssd_tokens * kv_bytes, partial(self._fetched, request)))
            world.record.totals.bytes_ssd += ssd_tokens * kv_bytes
            request.awaits += 1
        if tokens > ssd_tokens:
            size = (tokens - ssd_tokens) * kv_bytes
            request.flows.append(
                world.send((source.nic_out, node.nic_in), size, partial(self._fetched, request))
            )
            request.awaits += 1
        request.fetched_tokens += tokens
        world.record.totals.bytes_fetched += tokens * kv_bytes
        self._read_ssd(request, node, 0, begin)

    def _read_ssd(self, request: SimRequest, node: SimNode, begin: int, end: int) -> None:
        """Bring what the node holds on its SSD into its memory first."""
        on_ssd = node.on_ssd(request.blocks, begin, end)
        if not on_ssd:
            return
        size = on_ssd * self._block_tokens * node.profile.kv_bytes_per_token
        request.flows.append(self.world.send((node.ssd_read,), size, partial(self._fetched, request)))
        self.world.record.totals.bytes_ssd += size
        request.awaits += 1

    def _fetched(self, request: SimRequest, flow: Flow, now_s: float) -> None:
        if flow in request.flows:
            request.flows.remove(flow)
        latency_s = self.world.nodes[request.prefill].group.fetch_latency_s
        self.world.push(now_s + latency_s, self._arrived, request, request.attempt)

    def _arrived(self, request: SimRequest, attempt: int) -> None:
        """One of the things it awaited is there."""
        if request.attempt != attempt or request.state != SimStage.QUEUED:
            return
        request.awaits -= 1
        if request.awaits <= 0 and not request.ready:
            self.be_ready(request)

    def be_ready(self, request: SimRequest) -> None:
        """Its prefix is there: it may be computed when its turn comes."""
        world = self.world
        request.ready = True
        request.fetch_s = world.now_s - request.planned_from_s
        for row in request.members or (request.prefill,):
            heapq.heappush(world.nodes[row].ready, (request.order, request))
        self.try_start(world.nodes[request.prefill])

    def maker_done(self, request: SimRequest, maker: SimRequest, *, made: bool) -> None:
        """What it waited for is computed (or never will be): fetch it from there, or go on without."""
        world, choice = self.world, request.choice
        if request.state != SimStage.QUEUED or choice is None or request.ready:
            return
        node = world.nodes[request.prefill]
        have = world.index.leading_on(request.blocks, request.prefill, 0)
        source = maker.prefill
        there = world.index.leading_on(request.blocks, source, 0) if made else 0
        request.awaits -= 1
        request.planned = max(have, 0)
        if made and there > have and source != request.prefill and world.cluster.pool == PoolScope.GLOBAL:
            request.planned = there
            tokens = min(there * self._block_tokens, request.input_tokens) - have * self._block_tokens
            self._fetch(request, source, tokens)
        else:
            self._read_ssd(request, node, 0, have)
        if request.awaits <= 0:
            self.be_ready(request)

    # --- being computed

    def try_start(self, node: SimNode) -> None:
        """Begin the next prompt if the instance is free."""
        if not node.alive or node.computing is not None:
            return
        request = node.head()
        if request is None:
            return
        if node.role != PREFILL and not request.members:
            self.decoding.wake(node)
            return
        rows = request.members or (request.prefill,)
        nodes = [self.world.nodes[row] for row in rows]
        if any(member.computing is not None or member.head() is not request for member in nodes):
            return
        self.begin(request, nodes)

    def begin(self, request: SimRequest, nodes: list[SimNode]) -> None:
        """Compute the prompt on these instances from now on."""
        world, choice = self.world, request.choice
        assert choice is not None, "only decided requests are computed"
        node = world.nodes[request.prefill]
        held = world.index.leading_on(request.blocks, request.prefill, request.planned)
        request.cached_tokens = min(held * self._block_tokens, request.input_tokens - 1)
        if len(nodes) > 1:
            chunk = choice.chunk_tokens or node.group.chunk_tokens
            ideal_s = pipeline.seconds(
                node.profile.prefill, request.input_tokens, request.cached_tokens, len(nodes), chunk
            )
        else:
            ideal_s = node.profile.prefill.seconds(request.input_tokens, request.cached_tokens)
        request.compute_s = ideal_s * world.prefill_noise()
        request.compute_from_s = world.now_s
        request.queue_s = world.now_s - request.planned_from_s
        request.expected_s = world.now_s + request.compute_s
        request.state = SimStage.COMPUTING
        for member in nodes:
            member.take_off(request, choice.compute_s)
            member.computing = request
        self.scheduler.started(request)
        if not self._inside_batch(request, node):
            self._stream(request, node, request.compute_s)
            world.push(world.now_s + request.compute_s, self._computed, request, request.attempt)

    @staticmethod
    def _inside_batch(request: SimRequest, node: SimNode) -> bool:
        """The prompt is computed between or in the steps of the node's batch, whose time it then is."""
        return node.role != PREFILL and not request.members

    def _stream(self, request: SimRequest, node: SimNode, compute_s: float) -> None:
        """Hand the KV over layer by layer, not faster than it is made."""
        world = self.world
        if request.steps <= 0 or request.decode == request.prefill:
            return
        target = world.nodes[request.decode]
        held = world.index.leading_on(request.blocks, request.decode, 0) if target.group.dram_blocks else 0
        tokens = request.input_tokens - min(held * self._block_tokens, request.input_tokens)
        if tokens <= 0 or not target.alive:
            return
        size = tokens * node.profile.kv_bytes_per_token
        links = (node.nic_out, target.nic_in)
        request.stream = world.send(
            links, size, partial(self._streamed, request), ceiling=size / compute_s * _JUST_IN_TIME
        )
        world.record.totals.bytes_handed_over += size

    def _streamed(self, request: SimRequest, flow: Flow, now_s: float) -> None:
        if request.stream is flow:
            request.stream = None
            if request.state == SimStage.HANDOVER:
                self.decoding.load(request)

    def _computed(self, request: SimRequest, attempt: int) -> None:
        if request.attempt != attempt or request.state != SimStage.COMPUTING:
            return
        self.finish(request)
        world = self.world
        if request.steps <= 0:
            self.decoding.over_at_prefill(request)
        else:
            request.state = SimStage.HANDOVER
            if request.stream is None:
                self.decoding.load(request)
            else:
                world.network.raise_ceiling(request.stream, world.now_s)
        for row in request.members or (request.prefill,):
            self.try_start(world.nodes[row])

    def finish(self, request: SimRequest) -> None:
        """The prompt is computed: its instances are free, its blocks are in their memory, waiters go on."""
        world, now_s = self.world, self.world.now_s
        for row in request.members or (request.prefill,):
            member = world.nodes[row]
            member.computing = None
            if not self._inside_batch(request, member):
                member.busy_s += request.compute_s
        node = world.nodes[request.prefill]
        node.prompts += 1
        node.computed_tokens += request.input_tokens - request.cached_tokens
        partial = request.input_tokens % self._block_tokens != 0
        node.store(request.blocks, now_s, world.index, partial=partial)
        self.withdraw(request)
        self.scheduler.computed(request)
        world.record.computed(request)
        if world.cluster.first_token == FirstToken.PREFILL:
            request.ttft_s = now_s - request.arrival_s
            world.record.first_token(request)
        self.release_waiters(request, made=True)

    def release_waiters(self, request: SimRequest, *, made: bool) -> None:
        """Tell those who waited for this prompt."""
        waiters, request.waiters = request.waiters, []
        for waiter in waiters:
            self.maker_done(waiter, request, made=made)
