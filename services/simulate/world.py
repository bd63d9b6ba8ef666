"""What all parts of a running simulation share: the clock's queue, nodes, links, blocks, and the books kept.

Events are (time, number, handler, arguments): equal times go in the order in which they were pushed, so a run is
a function of its input alone.
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable
from dataclasses import replace
from math import inf
from typing import TYPE_CHECKING, Any

import numpy as np

from mooncache.conductor.core.fleet_book import FleetBook, InstanceShape
from mooncache.conductor.core.policy import overload
from mooncache.conductor.core.policy.fleet import ROLES
from mooncache.conductor.core.policy.placement import HELD_AT
from mooncache.conductor.core.policy.types import AdmissionMode, TransferCost
from mooncache.simulate.cluster import ClusterSpec, FirstToken, InstanceGroup
from mooncache.simulate.index import BlockHolders
from mooncache.simulate.network import Flow, Network
from mooncache.simulate.node import SimNode
from mooncache.simulate.options import SimOptions
from mooncache.simulate.record import SimRecord
from mooncache.simulate.sim_request import SimRequest

if TYPE_CHECKING:
    from mooncache.traces import Trace


class World:
    """State of a run. Rows of nodes are those of the conductor's book."""

    def __init__(self, trace: Trace, cluster: ClusterSpec, options: SimOptions) -> None:
        self.trace, self.cluster, self.options = trace, cluster, options
        # Where the first token comes before the hand-over, waiting for a place is a gap between tokens: no request is
        # held.
        holds = options.rules.holds and cluster.first_token == FirstToken.DECODE
        self.rules = replace(options.rules, holds=holds)
        self.now_s = 0.0
        self.queue: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self.pushed = 0
        self.events = 0
        self.rng = random.Random(options.seed)
        self.noise = np.random.default_rng(options.seed) if options.noise else None
        self.network = Network(self._push_flow)
        self.index = BlockHolders()
        # Decode load ahead costs time, and only these look at it.
        self.looks_ahead = options.policy == "mooncache" or options.rules.admission in {
            AdmissionMode.PREDICTED,
            AdmissionMode.LEARNED,
        }
        self.book = FleetBook(curves=self.looks_ahead)
        self.nodes: list[SimNode] = []
        self.row_of: dict[str, int] = {}
        self.inflight: dict[int, SimRequest] = {}  # block -> the request that computes it
        self.requests: dict[int, SimRequest] = {}  # requests that are under way
        self.order = 0
        self.ttft_slo_s = options.ttft_slo_s or cluster.slo.ttft_s
        self.tbt_slo_s = options.tbt_slo_s or cluster.slo.tbt_s
        pipelines = 0
        for group in cluster.instances:
            for number in range(group.count):
                stage = number % group.pipeline_size
                complete = number - stage + group.pipeline_size <= group.count
                if stage == 0:
                    pipelines += 1
                pipeline = pipelines if group.pipeline_size > 1 and complete else -1
                self.add_node(f"{group.label}-{number}", group, pipeline)
        self.record = SimRecord(trace, self.nodes, options, self.ttft_slo_s, self.tbt_slo_s)

    def add_node(self, name: str, group: InstanceGroup, pipeline: int = -1) -> SimNode:
        """Take an instance in, here and in the conductor's book."""
        profile = self.cluster.profile_of(group)
        kv = profile.kv_bytes_per_token
        node = SimNode(len(self.nodes), name, group, profile, self.network, self.cluster.block_tokens)
        capacity = node.batch.capacity_tokens
        if overload.holds(self.rules):
            node.batch.held_at_s = HELD_AT * self.tbt_slo_s
        early = self.cluster.first_token == FirstToken.PREFILL  # the hand-over is then behind the first token
        row = self.book.add(
            name,
            InstanceShape(
                role=ROLES[group.role],
                prefill=profile.prefill,
                transfer=TransferCost(group.fetch_latency_s, self.network.offer(node.nic_in) / kv),
                decode=profile.decode,
                sequences_max=group.sequences_max,
                kv_capacity_tokens=int(capacity) if capacity != inf else 0,
                pipeline=pipeline,
                handover=TransferCost(0.0, inf if early else profile.load_bytes_per_s / kv),
                tail=False,
            ),
        )
        assert row == node.row, "rows of the book and of the simulator are the same"
        self.nodes.append(node)
        self.row_of[name] = row
        self.index.bit(row)
        return node

    def push(self, at_s: float, handler: Callable[..., None], *arguments: object) -> None:
        """Call the handler at that time."""
        self.pushed += 1
        heapq.heappush(self.queue, (at_s, self.pushed, handler, arguments))

    def _push_flow(self, at_s: float, flow: Flow, version: int) -> None:
        self.pushed += 1
        heapq.heappush(self.queue, (at_s, self.pushed, self._flow_ends, (flow, version)))

    def _flow_ends(self, flow: Flow, version: int) -> None:
        if self.network.arrived(flow, version, self.now_s) and flow.done is not None:
            flow.done(flow, self.now_s)

    def send(
        self,
        links: tuple[int, ...],
        size: float,
        done: Callable[[Flow, float], None],
        ceiling: float = inf,
    ) -> Flow:
        """Begin a transfer; `done` is called when its last byte is there."""
        flow = self.network.start(links, size, self.now_s, ceiling)
        flow.done = done
        return flow

    def prefill_noise(self) -> float:
        """The factor by which an actual prefill differs from the model."""
        if self.noise is None:
            return 1.0
        sigma = self.options.noise
        return float(np.exp(self.noise.normal(-sigma * sigma / 2, sigma)))
