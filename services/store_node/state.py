"""What the duties and the control calls of one store node share.

The native server owns the blocks; this state only knows who the node is, which master it is registered with and
what has been reported. All of it is used from one event loop.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from mooncache.client.master_link import MasterLink
from mooncache.client.terms import Terms
from mooncache.errors import Unsupported
from mooncache.proto.v1 import common_pb2, store_node_pb2
from mooncache.runtime.channel import Channel
from mooncache.runtime.clock import Clock
from mooncache.store_node.core.report_planner import ReportPlanner
from mooncache.store_node.core.spare_copies import SpareCopies
from mooncache.store_node.fence import check_fence
from mooncache.store_node.identity import NodeIdentity
from mooncache.store_node.peer_trials import PeerTrials
from mooncache.store_node.quarantine import NodeQuarantine
from mooncache.store_node.surroundings import Surroundings
from mooncache.store_node.tenants import NodeTenants
from mooncache.store_node.writers import NodeWriters


class NodeCore(Protocol):
    """The part of the native StoreServer that the service uses; simulations bring their own."""

    def stats(self) -> dict[str, int]: ...
    def tenants(self) -> dict[int, str]: ...
    def event_seq(self) -> int: ...
    def rails(self) -> list[dict[str, Any]]: ...
    def drain_events(self, max_events: int, /) -> tuple[int, int, bool, bytes]: ...
    def snapshot(self, cursor: int, max_records: int, /) -> tuple[int, bytes]: ...
    def set_draining(self, draining: bool, /) -> None: ...
    def remove(self, tenant_id: int, keys: bytes, reason: int, /) -> list[int]: ...
    def pin(self, tenant_id: int, keys: bytes, ttl_ms: int, /) -> list[int]: ...
    def unpin(self, tenant_id: int, keys: bytes, /) -> list[int]: ...


@dataclass(slots=True)
class NodeMembership:
    """What the master said at registration; `registered` False means that the node serves without a master."""

    registered: bool = False
    master_id: str = ""
    term: int = 0
    node_index: int = 0
    heartbeat_interval_s: float = 1.0
    lease_s: float = 5.0
    heard_s: float = 0.0


class Copier(Protocol):
    """Fetches blocks from another node and stores them here (see `copier.py`)."""

    async def copy(
        self, tenant: str, keys: bytes, source: common_pb2.NodeInfo, timeout_s: float, bytes_per_s: int
    ) -> tuple[list[int], int]: ...

    async def reads(self, tenant: str, keys: bytes, timeout_s: float) -> list[int | None]: ...


@dataclass(slots=True)
class StoreNodeState:
    """The state of one store node, shared by its ops and duties."""

    identity: NodeIdentity
    core: NodeCore
    endpoints: common_pb2.Endpoints
    segments: list[common_pb2.Segment]
    clock: Clock
    rng: random.Random
    link: MasterLink | None
    copier: Copier | None = None
    tenants: NodeTenants | None = None
    writers: NodeWriters | None = None
    quarantine: NodeQuarantine | None = None
    channel_for: Callable[[str], Channel] | None = None
    """A channel to the control port of another node."""
    surroundings: Surroundings | None = None
    trials: PeerTrials = field(default_factory=PeerTrials)
    planner: ReportPlanner = field(default_factory=ReportPlanner)
    spares: SpareCopies = field(default_factory=SpareCopies)
    membership: NodeMembership = field(default_factory=NodeMembership)
    terms: Terms = field(default_factory=Terms)
    report_interval_s: float = 0.1
    call_timeout_s: float = 5.0
    draining: bool = False
    started_s: float = 0.0
    wake_membership: asyncio.Event = field(default_factory=asyncio.Event)
    counters: dict[str, int] = field(default_factory=dict)
    formats: dict[str, int] = field(default_factory=dict)

    def count(self, name: str, amount: int = 1) -> None:
        """Add to a counter of the service (the native server has its own)."""
        self.counters[name] = self.counters.get(name, 0) + amount

    def check_fence(self, fence: store_node_pb2.Fence) -> None:
        """Raises NotLeader or StaleIncarnation for a command that this node must not carry out."""
        check_fence(self.terms, self.identity.incarnation, fence)

    def require_tenants(self) -> NodeTenants:
        """The tenants of this node. Raises Unsupported for a node without them, as simulations have."""
        if self.tenants is None:
            raise Unsupported("This node keeps no table of tenants.")
        return self.tenants

    def require_writers(self) -> NodeWriters:
        """Who wrote blocks here. Raises Unsupported for a node that does not know, as in simulations."""
        if self.writers is None:
            raise Unsupported("This node does not know who wrote its blocks.")
        return self.writers

    def require_quarantine(self) -> NodeQuarantine:
        """Whose blocks are refused here. Raises Unsupported for a node that refuses none, as in simulations."""
        if self.quarantine is None:
            raise Unsupported("This node keeps no quarantine.")
        return self.quarantine

    def require_surroundings(self) -> Surroundings:
        """The node's host and peers. Raises Unsupported for a node without them, as simulations have."""
        if self.surroundings is None:
            raise Unsupported("This node cannot say what its host is like.")
        return self.surroundings

    def set_draining(self, draining: bool) -> None:
        """Refuse new blocks, or take them again."""
        self.draining = draining
        self.core.set_draining(draining)

    @property
    def node_state(self) -> common_pb2.NodeState:
        """Whether the node was asked to take no new blocks."""
        return common_pb2.NODE_STATE_DRAINING if self.draining else common_pb2.NODE_STATE_ACTIVE

    def rails(self) -> list[common_pb2.RdmaRail]:
        """The RDMA ports that the native server answers on, as they are now. It counts more than is reported to the
        master."""
        reported = common_pb2.RdmaRail.DESCRIPTOR.fields_by_name
        return [
            common_pb2.RdmaRail(**{name: value for name, value in rail.items() if name in reported})
            for rail in self.core.rails()
        ]

    def forget_master(self) -> None:
        """Register again as soon as possible; until then nothing is reported."""
        self.membership.registered = False
        self.planner.detach()
        self.wake_membership.set()


def arena_gone(stats: Mapping[str, int]) -> bool:
    """Whether the memory of the blocks does not answer now (a GPU that hangs)."""
    return stat(stats, "store_arena_gone") != 0


def stat(stats: Mapping[str, int], name: str) -> int:
    """A counter of the native server, 0 when this version does not have it."""
    return int(stats.get(name, 0))
