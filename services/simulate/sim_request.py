"""One request on its way: where it is, what it waits for, what it has cost so far."""

from __future__ import annotations

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


class SimRequest:
    """State of one request. `attempt` tells outdated events apart: every retry raises it."""

    __slots__ = (
        "arrival_s",
        "attempt",
        "awaits",
        "blocks",
        "cached_tokens",
        "choice",
        "compute_from_s",
        "compute_s",
        "decision",
        "decode",
        "expected_s",
        "fetch_s",
        "fetched_tokens",
        "flows",
        "index",
        "inflight_from",
        "input_tokens",
        "members",
        "order",
        "planned",
        "planned_from_s",
        "prefill",
        "queue_s",
        "ready",
        "sequence",
        "state",
        "steps",
        "stream",
        "ttft_s",
        "waiters",
    )

    def __init__(
        self, index: int, arrival_s: float, input_tokens: int, steps: int, blocks: list[int]
    ) -> None:
        self.index, self.arrival_s, self.input_tokens, self.steps = index, arrival_s, input_tokens, steps
        self.blocks = blocks
        self.attempt = 0
        self.state = SimStage.NEW
        self.decision = 0  # number of the decision that it follows
        self.order = 0  # place among all prompts that were queued: first come, first served
        self.choice: Choice | None = None
        self.prefill = self.decode = -1  # rows
        self.members: tuple[int, ...] = ()
        self.planned = 0  # leading blocks that will be there, as decided
        self.planned_from_s = 0.0
        self.awaits = 0  # things that have to come before the prompt can be computed
        self.ready = False
        self.flows: list[Flow] = []
        self.stream: Flow | None = None
        self.waiters: list[SimRequest] = []  # requests that wait for blocks this one computes
        self.inflight_from = -1  # from this block on it computes what no other request was computing
        self.sequence: SimSequence | None = None
        self.compute_from_s = self.compute_s = self.queue_s = self.fetch_s = self.ttft_s = 0.0
        self.expected_s = 0.0  # when the conductor expects the prompt to be computed
        self.cached_tokens = self.fetched_tokens = 0


class SimSequence:
    """One answer being generated; tokens are counted in steps of the batch."""

    __slots__ = (
        "first_gap_s",
        "first_step",
        "joined_s",
        "kv_tokens",
        "last_step",
        "request",
        "reserved_tokens",
        "steps",
    )

    def __init__(self, request: SimRequest, kv_tokens: int, steps: int) -> None:
        self.request, self.kv_tokens, self.steps = request, kv_tokens, steps
        self.reserved_tokens = kv_tokens + steps
        self.first_step = self.last_step = -1
        self.joined_s = 0.0
        # What its first gap is longer than the step (hand-over, waiting; less: stalls before).
        self.first_gap_s = 0.0
