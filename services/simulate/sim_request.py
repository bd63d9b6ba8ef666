"""One request on its way: where it is, what it waits for, what it has cost so far."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import IntEnum, StrEnum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mooncache.conductor.core.policy.types import Choice
    from mooncache.simulate.network import Flow


class SimOutcome(IntEnum):
    """How a request ended; the numbers are those of the column `outcome` of a result."""

    UNDECIDED = -1
    DONE = 0
    REJECTED = 1
    REJECTED_AFTER_PREFILL = 2
    FAILED = 3


class FailureReason(StrEnum):
    """Why a request failed; the conductor's `Reason` says why one was refused."""

    TOO_LARGE = "too_large"  # not even an empty instance has room for its KV
    BROKE_OFF = "broke_off"  # its instance failed after the first token
    INSTANCE_FAILED = "instance_failed"  # instances failed more often than it was tried again


class SimBranch(IntEnum):
    """How a prompt's KV came about; the numbers are those of the column `branch` of a result."""

    LOCAL = 0
    FETCH = 1
    WAIT = 2
    INLINE = 3  # computed where it was decoded


class SimStage(IntEnum):
    """Where a request is on its way."""

    NEW = 0
    QUEUED = 1
    COMPUTING = 2
    HANDOVER = 3
    DECODING = 4
    OVER = 5


@dataclass(slots=True, eq=False)
class SimRequest:
    """State of one request. `attempt` tells outdated events apart: every retry raises it."""

    index: int
    arrival_s: float
    input_tokens: int
    steps: int
    blocks: list[int]
    attempt: int = 0
    state: SimStage = SimStage.NEW
    decision: int = 0  # number of the decision that it follows
    order: int = 0  # place among all prompts that were queued: first come, first served
    choice: Choice | None = None
    prefill: int = -1  # row
    decode: int = -1
    members: tuple[int, ...] = ()
    planned: int = 0  # leading blocks that will be there, as decided
    planned_from_s: float = 0.0
    awaits: int = 0  # things that have to come before the prompt can be computed
    ready: bool = False
    flows: list[Flow] = field(default_factory=list)
    stream: Flow | None = None
    waiters: list[SimRequest] = field(default_factory=list)  # they wait for blocks that this one computes
    inflight_from: int = -1  # from this block on it computes what no other request was computing
    sequence: SimSequence | None = None
    compute_from_s: float = 0.0
    compute_s: float = 0.0
    queue_s: float = 0.0
    fetch_s: float = 0.0
    ttft_s: float = 0.0
    expected_s: float = 0.0  # when the conductor expects the prompt to be computed
    cached_tokens: int = 0
    fetched_tokens: int = 0


class SimSequence:
    """One answer being generated; tokens are counted in steps of the batch."""

    def __init__(self, request: SimRequest, kv_tokens: int, steps: int) -> None:
        self.request, self.kv_tokens, self.steps = request, kv_tokens, steps
        self.reserved_tokens = kv_tokens + steps
        self.first_step = self.last_step = -1
        self.joined_s = 0.0
        # What its first gap is longer than the step: hand-over, waiting, less stalls before.
        self.first_gap_s = 0.0
