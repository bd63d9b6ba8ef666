"""Prompts: fetching the prefix, waiting in line, being computed, and streaming the KV to the decode instance.

An instance computes one prompt at a time, the first of those whose prefix is there; fetches and waits overlap with
the queue. What it really holds when it begins decides what it computes, so a prefix that came meanwhile is used.
While it computes, layers stream to the decode instance as fast as they are made; the rest follows at the end.
A pipeline of instances begins a prompt when all of its members have come to it.
"""

from __future__ import annotations

import heapq
from typing import TYPE_CHECKING, Protocol

from mooncache.conductor.core.policy import pipeline
from mooncache.conductor.core.policy.fleet import PREFILL
from mooncache.conductor.core.policy.types import Branch
from mooncache.simulate.cluster import FirstToken, PoolScope
from mooncache.simulate.sim_request import SimRequest, SimStage

if TYPE_CHECKING:
    from mooncache.simulate.network import Flow
    from mooncache.simulate.node import SimNode
    from mooncache.simulate.scheduling import SimScheduler
    from mooncache.simulate.world import World

_JUST_IN_TIME = 1 + 1e-9  # a stream that nothing holds up ends with its prompt, not a rounding error later


class NextStage(Protocol):
    """What follows a prompt: the handlers of decoding."""

    def load(self, life: SimRequest) -> None:
        """All KV is in the decode node's memory."""

    def wake(self, node: SimNode) -> None:
        """A node has new work."""

    def over_at_prefill(self, life: SimRequest) -> None:
        """The first token was the only one."""


class Prefilling:
    """Handlers of everything that happens to a prompt until it is computed."""

    def __init__(self, world: World, scheduler: SimScheduler) -> None:
        self.world, self.scheduler = world, scheduler
        self.decoding: NextStage
        self._block_tokens = world.trace.block_tokens

    # --- coming in

    def enqueue(self, life: SimRequest) -> None:
        """The decision is made: fetch, wait and queue, all at once."""
        world, choice = self.world, life.choice
        assert choice is not None, "only decided requests are queued"
        inline = choice.prefill < 0
        life.prefill = choice.decode if inline else choice.prefill
        life.decode = choice.decode
        life.members = choice.members if len(choice.members) > 1 else ()
        life.state = SimStage.QUEUED
        life.order = world.order = world.order + 1
        life.planned_from_s = world.now_s
        life.expected_s = world.now_s + choice.ttft_s
        life.awaits, life.ready, life.flows = 0, False, []
        life.fetch_s, life.fetched_tokens = 0.0, 0
        prefix = min(choice.prefix_tokens, life.input_tokens)
        life.planned = self._whole_blocks(prefix, life)
        for row in life.members or (life.prefill,):
            world.nodes[row].enqueue(life, choice.compute_s)
        self._announce(life)
        node = world.nodes[life.prefill]
        maker = world.lives.get(int(choice.awaited.decision_id)) if choice.awaited is not None else None
        if (
            choice.branch is Branch.WAIT
            and maker is not None
            and maker.state in (SimStage.QUEUED, SimStage.COMPUTING)
        ):
            life.awaits += 1
            maker.waiters.append(life)
        elif choice.branch is Branch.FETCH and choice.fetch_tokens > 0:
            self._fetch(life, choice.source_row, choice.fetch_tokens)
        elif choice.branch is Branch.WAIT:
            life.planned = 0
        if choice.branch is Branch.LOCAL:
            self._read_ssd(life, node, 0, life.planned)
        if life.awaits == 0:
            self.be_ready(life)

    def _whole_blocks(self, tokens: int, life: SimRequest) -> int:
        """Blocks that hold so many leading tokens; the last of a prompt may be partial."""
        return len(life.blocks) if tokens >= life.input_tokens else tokens // self._block_tokens

    def _announce(self, life: SimRequest) -> None:
        """Say which blocks this request is going to compute, unless another one is at it."""
        inflight = self.world.inflight
        life.inflight_from = life.planned
        for block in life.blocks[life.planned :]:
            inflight.setdefault(block, life)

    def withdraw(self, life: SimRequest) -> None:
        """What it announced is there now, or never will be by it."""
        inflight = self.world.inflight
        for block in life.blocks[life.inflight_from :]:
            if inflight.get(block) is life:
                del inflight[block]

    def _fetch(self, life: SimRequest, source_row: int, tokens: int) -> None:
        """Read the part of the prefix that is missing here from another node."""
        world = self.world
        if source_row < 0 or source_row == life.prefill or not world.nodes[source_row].alive:
            life.planned = 0
            return
        node, source = world.nodes[life.prefill], world.nodes[source_row]
        kv_bytes = source.profile.kv_bytes_per_token
        begin = max(0, life.planned - -(-tokens // self._block_tokens))
        cold = source.on_ssd(life.blocks, begin, life.planned)
        cold_tokens = min(tokens, cold * self._block_tokens)
        if cold_tokens:
            links = (source.ssd_read, source.nic_out, node.nic_in)
            life.flows.append(world.send(links, cold_tokens * kv_bytes, self._fetched, life))
            world.record.totals.bytes_ssd += cold_tokens * kv_bytes
            life.awaits += 1
        if tokens > cold_tokens:
            size = (tokens - cold_tokens) * kv_bytes
            life.flows.append(world.send((source.nic_out, node.nic_in), size, self._fetched, life))
            life.awaits += 1
        life.fetched_tokens += tokens
        world.record.totals.bytes_fetched += tokens * kv_bytes
        self._read_ssd(life, node, 0, begin)

    def _read_ssd(self, life: SimRequest, node: SimNode, begin: int, end: int) -> None:
        """Bring what the node holds on its SSD into its memory first."""
        cold = node.on_ssd(life.blocks, begin, end)
        if not cold:
            return
        size = cold * self._block_tokens * node.profile.kv_bytes_per_token
        life.flows.append(self.world.send((node.ssd_read,), size, self._fetched, life))
        self.world.record.totals.bytes_ssd += size
        life.awaits += 1

    def _fetched(self, flow: Flow, now_s: float) -> None:
        life: SimRequest = flow.owner
        if flow in life.flows:
            life.flows.remove(flow)
        latency_s = self.world.nodes[life.prefill].group.fetch_latency_s
        self.world.push(now_s + latency_s, self._came, life, life.attempt)

    def _came(self, life: SimRequest, attempt: int) -> None:
        """One of the things it awaited is there."""
        if life.attempt != attempt or life.state != SimStage.QUEUED:
            return
        life.awaits -= 1
        if life.awaits <= 0 and not life.ready:
            self.be_ready(life)

    def be_ready(self, life: SimRequest) -> None:
        """Its prefix is there: it may be computed when its turn comes."""
        world = self.world
        life.ready = True
        life.fetch_s = world.now_s - life.planned_from_s
        for row in life.members or (life.prefill,):
            heapq.heappush(world.nodes[row].ready, (life.order, life))
        self.try_start(world.nodes[life.prefill])

    def maker_done(self, life: SimRequest, maker: SimRequest, *, made: bool) -> None:
        """What it waited for is computed (or never will be): fetch it from there, or go on without."""
        world, choice = self.world, life.choice
        if life.state != SimStage.QUEUED or choice is None or life.ready:
            return
        node = world.nodes[life.prefill]
        have = world.index.leading_on(life.blocks, life.prefill, 0)
        source = maker.prefill
        there = world.index.leading_on(life.blocks, source, 0) if made else 0
        life.awaits -= 1
        life.planned = max(have, 0)
        if made and there > have and source != life.prefill and world.cluster.pool == PoolScope.GLOBAL:
            life.planned = there
            tokens = min(there * self._block_tokens, life.input_tokens) - have * self._block_tokens
            self._fetch(life, source, tokens)
        else:
            self._read_ssd(life, node, 0, have)
        if life.awaits <= 0:
            self.be_ready(life)

    # --- being computed

    def try_start(self, node: SimNode) -> None:
        """Begin the next prompt if the instance is free."""
        if not node.alive or node.computing is not None:
            return
        life = node.head()
        if life is None:
            return
        if node.role != PREFILL and not life.members:
            self.decoding.wake(node)
            return
        rows = life.members or (life.prefill,)
        nodes = [self.world.nodes[row] for row in rows]
        if any(member.computing is not None or member.head() is not life for member in nodes):
            return
        self.begin(life, nodes)

    def begin(self, life: SimRequest, nodes: list[SimNode]) -> float:
        """Compute the prompt on these instances from now on; returns the seconds it takes."""
        world, choice = self.world, life.choice
        assert choice is not None, "only decided requests are computed"
        node = world.nodes[life.prefill]
        held = world.index.leading_on(life.blocks, life.prefill, life.planned)
        life.cached_tokens = min(held * self._block_tokens, life.input_tokens - 1)
        if len(nodes) > 1:
            chunk = choice.chunk_tokens or node.group.chunk_tokens
            ideal_s = pipeline.seconds(
                node.profile.prefill, life.input_tokens, life.cached_tokens, len(nodes), chunk
            )
        else:
            ideal_s = node.profile.prefill.seconds(life.input_tokens, life.cached_tokens)
        life.compute_s = ideal_s * world.prefill_noise()
        life.compute_from_s = world.now_s
        life.queue_s = world.now_s - life.planned_from_s
        life.expected_s = world.now_s + life.compute_s
        life.state = SimStage.COMPUTING
        for member in nodes:
            member.take_off(life, choice.compute_s)
            member.computing = life
        self.scheduler.started(life)
        if not self._inside_batch(life, node):
            self._stream(life, node, life.compute_s)
            world.push(world.now_s + life.compute_s, self._computed, life, life.attempt)
        return life.compute_s

    @staticmethod
    def _inside_batch(life: SimRequest, node: SimNode) -> bool:
        """The prompt is computed between or in the steps of the node's batch, whose time it then is."""
        return node.role != PREFILL and not life.members

    def _stream(self, life: SimRequest, node: SimNode, compute_s: float) -> None:
        """Hand the KV over layer by layer, not faster than it is made."""
        world = self.world
        if life.steps <= 0 or life.decode == life.prefill:
            return
        target = world.nodes[life.decode]
        held = world.index.leading_on(life.blocks, life.decode, 0) if target.group.dram_blocks else 0
        tokens = life.input_tokens - min(held * self._block_tokens, life.input_tokens)
        if tokens <= 0 or not target.alive:
            return
        size = tokens * node.profile.kv_bytes_per_token
        links = (node.nic_out, target.nic_in)
        life.stream = world.send(links, size, self._streamed, life, ceiling=size / compute_s * _JUST_IN_TIME)
        world.record.totals.bytes_handed_over += size

    def _streamed(self, flow: Flow, now_s: float) -> None:
        life: SimRequest = flow.owner
        if life.stream is flow:
            life.stream = None
            if life.state == SimStage.HANDOVER:
                self.decoding.load(life)

    def _computed(self, life: SimRequest, attempt: int) -> None:
        if life.attempt != attempt or life.state != SimStage.COMPUTING:
            return
        self.finish(life)
        world = self.world
        if life.steps <= 0:
            self.decoding.over_at_prefill(life)
        else:
            life.state = SimStage.HANDOVER
            if life.stream is None:
                self.decoding.load(life)
            else:
                world.network.raise_ceiling(life.stream, world.now_s)
        for row in life.members or (life.prefill,):
            self.try_start(world.nodes[row])

    def finish(self, life: SimRequest) -> None:
        """The prompt is computed: its instances are free, its blocks are in their memory, waiters go on."""
        world, now_s = self.world, self.world.now_s
        for row in life.members or (life.prefill,):
            member = world.nodes[row]
            member.computing = None
            if not self._inside_batch(life, member):
                member.busy_s += life.compute_s
        node = world.nodes[life.prefill]
        node.prompts += 1
        node.computed_tokens += life.input_tokens - life.cached_tokens
        partial = life.input_tokens % self._block_tokens != 0
        node.store(life.blocks, now_s, world.index, partial=partial)
        self.withdraw(life)
        self.scheduler.computed(life)
        world.record.computed(life)
        if world.cluster.first_token == FirstToken.PREFILL:
            life.ttft_s = now_s - life.arrival_s
            world.record.first_token(life)
        self.release_waiters(life, made=True)

    def release_waiters(self, life: SimRequest, *, made: bool) -> None:
        """Tell those who waited for this prompt."""
        waiters, life.waiters = life.waiters, []
        for waiter in waiters:
            self.maker_done(waiter, life, made=made)
