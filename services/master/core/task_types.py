"""The plain data of tasks.

Their limits, what planning may ask, and the effects that the shell carries out.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from mooncache.master.core.placement import Candidate, Domains

BlockId = tuple[int, bytes]


class TaskKind(enum.Enum):
    """What a task does."""

    REPLICATE = "replicate"
    DRAIN = "drain"


class TaskState(enum.Enum):
    """How far it is; the last three are final."""

    QUEUED = "queued"
    RUNNING = "running"
    DONE = "done"
    FAILED = "failed"
    CANCELLED = "cancelled"


@dataclass(frozen=True, slots=True)
class TaskRules:
    """Limits of tasks."""

    steps_in_flight_max: int = 4  # copies under way at once, in all
    steps_per_node_max: int = 2  # copies under way at once into one node
    keys_per_step: int = 256  # keys of one copy call
    attempts_max: int = 5  # how often a block is tried
    retry_delay_s: float = 0.5  # wait before the second try, doubled for each further one
    active_max: int = 64  # tasks that are not over
    kept_max: int = 1000  # tasks over that can still be asked for
    listing_timeout_s: float = 30.0  # wait for a draining node's full report
    passes_max: int = 8  # how often a drain looks again


class PlanningView(Protocol):
    """What planning may ask; answered from the master's memory."""

    def holders(self, tenant_id: int, keys: Sequence[bytes]) -> list[list[int]]:
        """For each key the indices of nodes that hold it."""

    def readable(self, index: int) -> bool:
        """Whether a node can be copied from."""

    def lasting(self, index: int) -> bool:
        """Whether a copy on this node counts (not draining, not dead)."""

    def draining(self, index: int) -> bool:
        """Whether the node itself says that it takes no new blocks."""

    def candidates(self) -> list[Candidate]:
        """Nodes that may receive blocks."""

    def sites(self) -> dict[int, Domains]:
        """Every known node and where it is."""


@dataclass(frozen=True, slots=True)
class CopyStep:
    """Let `target` fetch blocks from `source`. Answer with `TaskBook.on_step`."""

    step_id: int
    source: int
    target: int
    tenant_id: int
    keys: tuple[bytes, ...]
    spare: bool = False


@dataclass(frozen=True, slots=True)
class DropStep:
    """Let `node` drop blocks that have been moved. Answer with `TaskBook.on_step`."""

    step_id: int
    node: int
    tenant_id: int
    keys: tuple[bytes, ...]


@dataclass(frozen=True, slots=True)
class WantContents:
    """Get a full report of a node and hand it to `TaskBook.on_contents`."""

    node: int


TaskStep = CopyStep | DropStep
Effect = CopyStep | DropStep | WantContents
