"""One instance with its memory: a prompt queue (first come, first served among those that are ready), a decode
batch, cache tiers and links.

Invariant: the cluster's block index has a node's bit for a block exactly while one of the node's tiers holds it;
all changes of a tier go through `store` or `wipe`.
"""

from __future__ import annotations

import heapq
import math
from typing import TYPE_CHECKING

from mooncache.conductor.core.policy.fleet import ROLES
from mooncache.simulate.cache import LEARNT, NO_INFO, NodeCache, UseInfo, make
from mooncache.simulate.cache.ssd import SsdTier
from mooncache.simulate.cluster import GBPS, InstanceGroup
from mooncache.simulate.decode import Batch

if TYPE_CHECKING:
    from mooncache.simulate.index import BlockHolders
    from mooncache.simulate.network import Network
    from mooncache.simulate.profile import ModelProfile
    from mooncache.simulate.sim_request import SimRequest

_PARTIAL = UseInfo(last_partial=True)


class SimNode:
    """An instance and its row. Links: SSD reads, NIC out, NIC in (numbers of the network)."""

    def __init__(
        self,
        row: int,
        name: str,
        group: InstanceGroup,
        profile: ModelProfile,
        network: Network,
        block_tokens: int,
    ) -> None:
        self.row, self.name, self.group, self.profile = row, name, group, profile
        self.role = ROLES[group.role]
        self.alive = True
        self.switching = False
        capacity = group.kv_capacity_tokens or profile.kv_capacity_tokens
        self.batch = Batch(profile.decode, capacity, group.sequences_max or math.inf)
        self.batch_event_s = math.inf
        self.batch_version = 0
        # prompts
        self.queue: dict[int, SimRequest] = {}  # all that wait here, by order
        self.ready: list[tuple[int, SimRequest]] = []
        self.computing: SimRequest | None = None
        self.queued_s = 0.0  # expected computing time of the queue
        self.chunk_from = 0
        self.busy_s = 0.0
        self.prompts = 0
        self.computed_tokens = 0
        self.answers = 0
        # memory and links
        self._block_bytes = max(1, round(profile.kv_bytes_per_token * block_tokens))
        self.dram, self.ssd = self._empty_tiers()
        self.ssd_read = network.add(group.ssd_read_gbytes_per_s * 1e9)
        self.nic_out = network.add(group.nic_out_gbps * GBPS * group.nic_efficiency)
        self.nic_in = network.add(group.nic_in_gbps * GBPS * group.nic_efficiency)

    @property
    def idle(self) -> bool:
        """Nothing is queued, computed or generated here."""
        return not (self.queue or self.computing or self.batch.running or self.batch.waiting)

    def enqueue(self, request: SimRequest, expected_s: float) -> None:
        """A prompt waits here from now on."""
        self.queue[request.order] = request
        self.queued_s += expected_s

    def head(self) -> SimRequest | None:
        """The prompt that is next: the first of those that are ready; it stays in the queue."""
        while self.ready:
            order, request = self.ready[0]
            if self.queue.get(order) is request:
                return request
            heapq.heappop(self.ready)
        return None

    def take_off(self, request: SimRequest, expected_s: float) -> None:
        """A prompt no longer waits here."""
        if self.queue.pop(request.order, None) is not None:
            self.queued_s = max(0.0, self.queued_s - expected_s) if self.queue else 0.0

    def store(self, blocks: list[int], now_s: float, index: BlockHolders, *, partial: bool = False) -> None:
        """A chain was used here: touch, admit, evict, demote to the SSD, and tell the index."""
        if not self.group.dram_blocks:
            return
        row, dram, ssd = self.row, self.dram, self.ssd
        if ssd is not None:
            ssd.used(blocks)
        gone = dram.use(blocks, now_s, _PARTIAL if partial else NO_INFO)
        if ssd is not None:
            # What memory does not keep at all is evicted as soon as it has come.
            gone = ssd.take((*gone, *(block for block in blocks if block not in dram)), now_s)
        if gone:
            index.remove(gone, row)
        index.add(dram.held(blocks) if ssd is None else self._held(ssd, blocks), row)

    def _held(self, ssd: SsdTier, blocks: list[int]) -> list[int]:
        return [block for block in blocks if block in self.dram or block in ssd]

    def _empty_tiers(self) -> tuple[NodeCache, SsdTier | None]:
        group = self.group
        if not group.ssd_blocks:
            return make(group.eviction, group.dram_blocks), None
        options = {"tells_chances": True} if group.eviction == LEARNT else {}
        dram = make(group.eviction, group.dram_blocks, **options)
        write_bytes_per_s = group.ssd_write_gbytes_per_s * 1e9
        return dram, SsdTier(dram, group.ssd_blocks, self._block_bytes, write_bytes_per_s)

    def discard(self, blocks: list[int], index: BlockHolders) -> None:
        """These blocks are taken out of all tiers."""
        for block in blocks:
            self.dram.discard(block)
            if self.ssd is not None:
                self.ssd.discard(block)
        index.remove(blocks, self.row)

    def on_ssd(self, blocks: list[int], begin: int, end: int) -> int:
        """How many of the blocks [begin, end) of a chain are here on SSD only."""
        if self.ssd is None:
            return 0
        return sum(1 for block in blocks[begin:end] if block not in self.dram)

    def wipe(self, index: BlockHolders) -> None:
        """Everything that was in memory is lost."""
        index.forget_row(self.row)
        self.dram, self.ssd = self._empty_tiers()
