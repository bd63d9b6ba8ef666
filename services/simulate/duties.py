"""What the conductor does from time to time: plan the roles of the instances, and copies of hot prefixes.

Duties go on as long as requests come or are under way. A copy is a flow like any other; it is stored when its last
byte is there. Of the copies that may go only those are dropped that were made here, as the conductor's own duty does,
and of them only the blocks that came with the copy.
Invariant: the last copy of a block is never dropped here.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from mooncache.conductor.core.policy.replication import PrefixDemand, plan_replicas
from mooncache.conductor.core.policy.roles import RolePlanner
from mooncache.simulate.cluster import PoolScope

if TYPE_CHECKING:
    from mooncache.simulate.failures import FailureInjector
    from mooncache.simulate.network import Flow
    from mooncache.simulate.node import SimNode
    from mooncache.simulate.sim_request import SimRequest
    from mooncache.simulate.world import World

_CHAINS_MAX = 8192
_HOTTEST = 256


class Duties:
    """Periodic handlers; they exist only where the cluster asks for them."""

    def __init__(self, world: World, failures: FailureInjector) -> None:
        self.world, self.failures = world, failures
        self._planner = RolePlanner(world.cluster.roles.switch_s)
        self._demand = PrefixDemand()
        self._chains: dict[int, list[int]] = {}  # key of a prefix -> its blocks
        self._copying: set[tuple[int, int]] = set()  # (key, row) under way
        # (key, row) -> the blocks that the copy brought there
        self._made: dict[tuple[int, int], list[int]] = {}
        self.replicates = world.cluster.replication.enabled and world.cluster.pool == PoolScope.GLOBAL
        if not len(world.trace):
            return
        begin_s = float(world.trace.arrival_s[0])
        if world.cluster.roles.enabled:
            world.push(begin_s, self._plan_roles)
        if self.replicates:
            world.push(begin_s, self._plan_copies)

    def _goes_on(self) -> bool:
        return bool(self.world.requests) or self.world.now_s < self.world.trace.arrival_s[-1]

    def _plan_roles(self) -> None:
        world, book = self.world, self.world.book
        switches = self._planner.plan(book.view(world.now_s), book.arrived_s, world.tbt_slo_s, world.now_s)
        for row, role in switches:
            self.failures.switch(world.nodes[row], role)
        if self._goes_on():
            world.push(world.now_s + world.cluster.roles.every_s, self._plan_roles)

    # --- copies of hot prefixes

    def used(self, request: SimRequest) -> None:
        """A request that begins with a known prefix was scheduled: that prefix is in demand.

        Prefixes are counted at depths of 1, 2, 4, ... blocks, so that different requests name the same ones.
        """
        choice = request.choice
        if not self.replicates or choice is None:
            return
        blocks = choice.prefix_tokens // self.world.trace.block_tokens
        if not blocks:
            return
        depth = 1 << (blocks.bit_length() - 1)
        key = request.blocks[depth - 1]
        self._demand.use(key, depth * self.world.trace.block_tokens, self.world.now_s)
        if key not in self._chains:
            if len(self._chains) >= _CHAINS_MAX:
                self._chains.clear()
            self._chains[key] = request.blocks[:depth]

    def _plan_copies(self) -> None:
        world = self.world
        holders = {
            key: [node.row for node in world.nodes if world.index.holders(key) >> node.row & 1]
            for key, _ in self._demand.hottest(_HOTTEST, world.now_s)
            if key in self._chains
        }
        sends = [world.network.offer(node.nic_out) for node in world.nodes if node.alive]
        kv_bytes = world.cluster.profile.kv_bytes_per_token
        send_tokens_per_s = float(np.mean(sends)) / kv_bytes if sends else 0.0
        fleet = world.book.view(world.now_s)
        makes, drops = plan_replicas(self._demand, holders, fleet, send_tokens_per_s, world.now_s)
        for key, row, tokens in makes:
            self._copy(key, world.nodes[row], tokens * kv_bytes)
        for key, row, _ in drops:
            self._drop(self._made.pop((key, row), []), world.nodes[row])
        if self._goes_on():
            world.push(world.now_s + world.cluster.replication.every_s, self._plan_copies)

    def _copy(self, key: int, target: SimNode, size: float) -> None:
        world, chain = self.world, self._chains[key]
        whole = [
            node
            for node in world.nodes
            if node.alive and node is not target and world.index.leading_on(chain, node.row, 0) == len(chain)
        ]
        if not whole or not target.alive or (key, target.row) in self._copying:
            return
        source = max(whole, key=lambda node: world.network.offer(node.nic_out))
        self._copying.add((key, target.row))
        world.send((source.nic_out, target.nic_in), size, partial(self._copied, key, chain, target))
        world.record.totals.bytes_replicated += size
        world.record.totals.copies += 1

    def _copied(self, key: int, chain: list[int], target: SimNode, _flow: Flow, now_s: float) -> None:
        self._copying.discard((key, target.row))
        if not target.alive:
            return
        index = self.world.index
        self._made[key, target.row] = [block for block in chain if not index.holders(block) >> target.row & 1]
        target.store(chain, now_s, index)

    def _drop(self, blocks: list[int], node: SimNode) -> None:
        """Take the blocks of a copy away again, except those of which it is the last one."""
        index = self.world.index
        node.discard([block for block in blocks if index.holders(block).bit_count() > 1], index)
