"""What the doctor knows of a cluster: plain values from one look. What did not answer has a sentence in its place."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from mooncache.topology.core.host_facts import HostFacts


@dataclass(frozen=True, slots=True)
class ClockOffset:
    """A host's clock minus ours. The truth is within `bound_s` of it: half of the round trip."""

    offset_s: float
    bound_s: float


@dataclass(frozen=True, slots=True)
class Reach:
    """Whether one node reaches another one; "" of a port that answered."""

    control: str = ""
    data: str = ""
    data_ms: float = 0.0


@dataclass(frozen=True, slots=True)
class BlockProbe:
    """A block written to one node, read back and removed, by the client that engines use."""

    error: str = ""
    put_ms: float = 0.0
    get_ms: float = 0.0


@dataclass(frozen=True, slots=True)
class NodeFacts:
    """A store node: what the master says of it, and what it said itself."""

    node_id: str
    host_id: str = ""
    target: str = ""
    data: str = ""
    state: str = "active"
    version: str = ""
    capacity_bytes: int = 0
    used_bytes: int = 0
    pinned_bytes: int = 0
    heartbeat_age_s: float = 0.0
    arena_gone: bool = False
    offers_rdma: bool = False
    error: str = ""
    """Why it did not answer us; "" when it did."""
    clock: ClockOffset | None = None
    host: HostFacts | None = None
    counters: Mapping[str, int] = field(default_factory=dict)
    reach: Mapping[str, Reach] = field(default_factory=dict)
    """By node; no entry for one that was not tried."""
    latencies_ms: Mapping[str, float] = field(default_factory=dict)
    """Median round trip to other nodes, as this node measures it all the time; no entry where none succeeded."""
    probe: BlockProbe | None = None
    uptime_s: float = 0.0


@dataclass(frozen=True, slots=True)
class TenantUse:
    """What a tenant holds and has done in the whole pool."""

    memory_bytes: int = 0
    hits: int = 0
    misses: int = 0
    share_bytes: int = 0
    """On each node; 0: none."""
    quota_bytes: int = 0


@dataclass(frozen=True, slots=True)
class PoolFacts:
    """The masters and the store nodes."""

    error: str = ""
    """Why no master leads or answers; "" when one does."""
    refused: bool = False
    """It answered, and does not take our token."""
    master_id: str = ""
    version: str = ""
    directory_complete: bool = True
    masters: int = 1
    nodes: tuple[NodeFacts, ...] = ()
    tenants: Mapping[str, TenantUse] | None = None
    """None: not allowed to ask, or not answered."""
    repair: Mapping[str, Any] | None = None
    """As `mooncache repair status --json`; None: not answered."""


@dataclass(frozen=True, slots=True)
class ServingFacts:
    """Conductor, gateways and engines."""

    conductor_target: str = ""
    conductor_error: str = ""
    conductor: Mapping[str, Any] = field(default_factory=dict)
    gateway_url: str = ""
    gateway_reason: str = ""
    """Why the gateway of this machine is not ready."""
    instances: tuple[Mapping[str, Any], ...] = ()
    """As `mooncache status --json` has them; `passport` beside it."""
    agreement: tuple[Mapping[str, Any], ...] | None = None
    """By model, as POST /agreement answers; `saved` of an instance: how many of its keys the pool has, None when it
    was not asked; `read_backs`: what engines loaded of it. None: no gateway answered."""
    agreement_error: str = ""
    decisions: tuple[Mapping[str, Any], ...] = ()
    engine_logs: Mapping[str, str] = field(default_factory=dict)
    """The end of the log of engines of this machine that are not ready."""


@dataclass(frozen=True, slots=True)
class MemberFacts:
    """A process of the cluster, as the conductor lists it."""

    kind: str
    name: str
    host: str
    state: str
    version: str = ""
    heard_age_s: float = 0.0
    clock: ClockOffset | None = None
    """Against ours; None: not compared."""

    @property
    def label(self) -> str:
        """The process for people."""
        return f"{self.kind} {self.name} on {self.host}"


@dataclass(frozen=True, slots=True)
class Facts:
    """Everything that the checks see."""

    here: HostFacts
    pool: PoolFacts | None = None
    """None: no cluster is known here."""
    serving: ServingFacts | None = None
    members: tuple[MemberFacts, ...] | None = None
    """None: no conductor lists them; `members_error` says why."""
    members_error: str = ""
    token_error: str = ""
    """Why the token, the settings or the state folder are of no use here."""
    busy_ports: Mapping[str, int] = field(default_factory=dict)
    """Ports of the settings that something else has, by setting; looked at while no cluster runs here."""
    parts: tuple[tuple[str, str], ...] = ()
    """Processes of `mooncache up` that are not as they should be: name and what is wrong."""
    engine_problem: str = ""
    """Why an engine, as this host is configured, must not be started."""
    uses_vllm: bool = False
    now_s: float = 0.0
    """Our clock, Unix time."""

    @property
    def hosts(self) -> dict[str, HostFacts]:
        """Each description that there is, by the name to show: ours, and that of each node."""
        nodes = self.pool.nodes if self.pool is not None else ()
        found = {"here": self.here}
        found |= {node.node_id: node.host for node in nodes if node.host is not None}
        return found
