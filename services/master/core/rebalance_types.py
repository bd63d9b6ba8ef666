"""The plain data of the rebalance: its rules, what it may ask, what it shows."""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from mooncache.master.core.placement import Domains
from mooncache.master.core.repair_types import AuditAsk, AuditPage


@dataclass(frozen=True, slots=True)
class RebalanceRules:
    """Limits of the rebalance. The configuration has the first three."""

    bytes_per_s: float
    """Of moves, in the whole cluster; 0: none are made."""
    settle_s: float
    """Wait after a node came or went: others may come or go with it, and a lost one may come back."""
    lag_s: float
    """Nodes' figures may be this old (heartbeats carry them): what was moved since then counts beside them."""
    begin_share: float = 0.2
    """A round begins when the fill (used over capacity) of the fullest and of the emptiest node differ by more."""
    end_share: float = 0.05
    """It ends when they differ by less."""
    planned_share: float = 1.5
    """A round plans at most so much of what is beyond the mean fill at its beginning: so it ends."""
    steps_in_flight_max: int = 4
    """Copies under way at once, and orders to drop."""
    keys_per_step: int = 1024
    step_s: float = 0.1
    """Bytes of one step: what the limit allows in this time, or one block."""
    pace: float = 2.0
    """The rate at which a step's blocks come into a node, over `bytes_per_s`: a step ends well before the next plan."""
    page_entries: int = 65_536
    """Entries of the directory that are looked at in one go."""
    page_found: int = 256
    """Blocks that are looked up in one go."""
    room_share: float = 1 / 32
    """Share of a node's capacity that stays free: a move displaces no block."""
    overlap_s: float = 1.0
    """A block has both copies for so long: who asked the new node just too early comes to the old one."""
    drop_attempts_max: int = 5
    drop_delay_s: float = 1.0
    """How often a copy that stays (a pinned one) is asked to go, and the pause before each further time."""
    moving_max: int = 65_536
    """Blocks under way, beside one step."""
    skipped_max: int = 65_536
    """Blocks that could not be moved, of one round."""


class NodeFill(NamedTuple):
    """How full a node's memory is."""

    capacity_bytes: int
    used_bytes: int
    takes: bool
    """Whether it may receive blocks."""
    domains: Domains
    gives: bool = True
    """Whether blocks may move off it."""

    @property
    def share(self) -> float:
        """Used over capacity."""
        return self.used_bytes / self.capacity_bytes


class Move(NamedTuple):
    """One copy goes from a node to another one."""

    source: int
    target: int


class RebalanceView(Protocol):
    """What the rebalance may ask; answered from the master's memory."""

    def fills(self) -> dict[int, NodeFill]:
        """The nodes between which blocks may move: alive, not draining, of host memory."""

    def holders(self, tenant_id: int, keys: Sequence[bytes]) -> list[list[int]]:
        """For each key the indices of nodes that hold it."""

    def lasting(self, index: int) -> bool:
        """Whether a copy on this node counts (not draining, not dead)."""

    def sites(self) -> Mapping[int, Domains]:
        """Every known node and where it is."""

    def may_move(self, tenant_id: int) -> bool:
        """Whether a tenant's blocks may move: its name is known, and they have no end of life, which begins anew with
        each copy."""

    def calm(self) -> bool:
        """Whether no repair and no drain is under way: they go first."""

    def audit(self, ask: AuditAsk, start: int, entries_max: int, found_max: int) -> AuditPage:
        """Look at a part of the directory."""


class RebalanceState(enum.Enum):
    """What the rebalance does."""

    OFF = "off"
    AT_REST = "at_rest"
    WAITING = "waiting"
    MOVING = "moving"


@dataclass(slots=True)
class RebalanceFigures:
    """What is shown of the rebalance."""

    state: RebalanceState = RebalanceState.OFF
    wait_s: float = 0.0
    left_bytes: int = 0
    bytes_per_s: float = 0.0
    estimate_s: float = 0.0
    moved_bytes: int = 0
    moved_blocks: int = 0
    skipped_blocks: int = 0
    steps_in_flight: int = 0
    fullest_share: float = 0.0
    emptiest_share: float = 0.0
