"""The plain data of the repair: its rules, what it may ask, what it orders, what it shows."""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from mooncache.master.core.placement import Candidate, Domains, FailureDomains

NO_DOMAIN = 0xFFFF
"""The number of a node whose copies do not count, in an audit."""


@dataclass(frozen=True, slots=True)
class RepairRules:
    """Limits of the repair. The configuration has the first three."""

    bytes_per_s: float
    """Of copies, in the whole cluster; 0: none are made."""
    grace_s: float
    """Wait for a lost node, or for the nodes after a master's beginning."""
    replicas: int
    """Copies of blocks of tenants without a number of their own."""
    settle_s: float = 2.0
    """A block has to be short for so long: reports of a put to several nodes do not arrive together."""
    steps_in_flight_max: int = 8
    steps_per_node_max: int = 2
    """Copies under way at once, in all and into one node."""
    keys_per_step: int = 1024
    step_s: float = 0.05
    """Bytes of one step: what the limit allows in this time, or one block."""
    pace: float = 2.0
    """The rate at which a step's blocks come into a node, over `bytes_per_s`: a step ends well before the next plan."""
    queue_max: int = 65_536
    """Blocks that wait for their copy."""
    page_entries: int = 65_536
    """Entries of the directory that are looked at in one go."""
    count_pages: int = 4
    """Pages of a count in one go."""
    retry_delay_s: float = 1.0
    retry_delay_max_s: float = 60.0
    """Wait after a copy that failed, doubled for each further one."""
    resting_max: int = 65_536
    """Blocks whose failures are remembered."""
    watched_max: int = 131_072
    """Blocks that were copied, and whose surplus copies are looked for."""
    watch_interval_s: float = 2.0
    watch_keys: int = 512
    """How often, and how many at once."""
    room_share: float = 1 / 32
    """Share of a node's capacity that stays free unless a loss is made good."""


@dataclass(frozen=True, slots=True)
class Targets:
    """How many copies blocks should have."""

    of_others: int = 1
    tenants: Mapping[int, int] = field(default_factory=dict)
    """Tenant id -> copies, where the tenant has a number of its own."""

    def of(self, tenant_id: int) -> int:
        """Copies of each block of a tenant, at least 1."""
        return self.tenants.get(tenant_id, self.of_others)

    @property
    def any(self) -> bool:
        """Whether any block should have more than one."""
        return self.of_others > 1 or any(count > 1 for count in self.tenants.values())


class AuditAsk(NamedTuple):
    """What to look for in the directory."""

    wanted: tuple[tuple[int, int], ...]
    """(tenant id, copies)."""
    wanted_of_others: int
    domains: tuple[int, ...]
    """Number of the failure domain of each node, by index; NO_DOMAIN where a copy does not count."""
    domain_count: int


class AuditedBlock(NamedTuple):
    """A block that has too few copies, or (`close`) enough of them in too few failure domains."""

    tenant_id: int
    key: bytes
    size_bytes: int
    copies: int
    tier: int
    """The fastest that holds a copy, as the native index numbers them."""
    close: bool


class AuditPage(NamedTuple):
    """A part of the directory."""

    next: int
    """Where to go on; 0: all was seen."""
    short_blocks: int
    missing_bytes: int
    close_blocks: int
    close_bytes: int
    found: Sequence[AuditedBlock]


class RepairView(Protocol):
    """What the repair may ask; answered from the master's memory."""

    def holders(self, tenant_id: int, keys: Sequence[bytes]) -> list[list[int]]:
        """For each key the indices of nodes that hold it."""

    def readable(self, index: int) -> bool:
        """Whether a node can be copied from."""

    def lasting(self, index: int) -> bool:
        """Whether a copy on this node counts (not draining, not dead)."""

    def candidates(self) -> list[Candidate]:
        """Nodes that may receive blocks."""

    def sites(self) -> dict[int, Domains]:
        """Every known node and where it is."""

    def targets(self) -> Targets:
        """How many copies are wanted."""

    def may_copy(self, tenant_id: int) -> bool:
        """Whether copies can be ordered for a tenant: its name is known."""

    def audit(self, ask: AuditAsk, start: int, entries_max: int, found_max: int) -> AuditPage:
        """Look at a part of the directory; with `found_max` 0 only count."""


@dataclass(frozen=True, slots=True)
class RepairStep:
    """Let `target` fetch blocks from `source`. Answer with `on_step` of the book that planned it."""

    step_id: int
    source: int
    target: int
    tenant_id: int
    keys: tuple[bytes, ...]
    size_bytes: int
    bytes_per_s: float
    """Of all steps into `target` together."""
    spare: bool = False
    """The copies may go again before other blocks do."""


@dataclass(frozen=True, slots=True)
class TrimOrder:
    """Let copies go that are too many: for each key who keeps it and whose copy goes.

    Answer with `on_trimmed` of the book that planned it.
    """

    tenant_id: int
    keys: tuple[bytes, ...]
    stay: tuple[tuple[int, ...], ...]
    go: tuple[int, ...]


class RepairState(enum.Enum):
    """What the repair does."""

    OFF = "off"
    WHOLE = "whole"
    WAITING = "waiting"
    REPAIRING = "repairing"
    BLOCKED = "blocked"


@dataclass(slots=True)
class RepairFigures:
    """What is shown of the repair."""

    state: RepairState = RepairState.OFF
    wait_s: float = 0.0
    short_blocks: int = 0
    left_bytes: int = 0
    close_blocks: int = 0
    queued_blocks: int = 0
    steps_in_flight: int = 0
    resting_blocks: int = 0
    resting_code: int = 0
    bytes_per_s: float = 0.0
    estimate_s: float = 0.0
    copied_bytes: int = 0
    copied_blocks: int = 0
    trimmed: int = 0


@dataclass(frozen=True, slots=True)
class RepairLayout:
    """Nodes and targets as of one plan."""

    targets: Targets
    sites: Mapping[int, Domains]
    lasting: frozenset[int]
    candidates: Sequence[Candidate]
    domains: FailureDomains

    def wanted(self, tenant_id: int) -> int:
        """Copies of a tenant's blocks, as many as there are nodes for."""
        return min(self.targets.of(tenant_id), max(1, len(self.lasting)))

    def ask(self) -> AuditAsk:
        """The question that follows from it."""
        count = max(self.sites, default=-1) + 1
        numbers = [NO_DOMAIN] * count
        for index in self.lasting:
            numbers[index] = self.domains.numbers[index]
        wanted = tuple((tenant_id, self.wanted(tenant_id)) for tenant_id in sorted(self.targets.tenants))
        others = min(self.targets.of_others, max(1, len(self.lasting)))
        return AuditAsk(wanted, others, tuple(numbers), self.domains.placeable)
