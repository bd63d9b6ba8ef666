"""What a policy is given and what it answers: cost models, a request, the rules, a choice.

All times are seconds, all lengths tokens, instances are rows of a `Fleet`. Values are plain and frozen, so
that a decision can be recorded, replayed and simulated exactly.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import StrEnum
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]

NO_ROW = -1  # as a row: no instance, or the store nodes


class Branch(StrEnum):
    """How the KV of a prompt comes about, beside what is computed."""

    LOCAL = "local"
    FETCH = "fetch"
    WAIT = "wait"


class Reason(StrEnum):
    """Why a request was admitted or refused."""

    ADMITTED = "admitted"
    TTFT = "ttft"
    TBT = "tbt"
    CAPACITY = "capacity"
    NO_INSTANCE = "no_instance"
    UNKNOWN_MODEL = "unknown_model"
    TOO_LONG = "too_long"
    OFFLINE = "offline"
    """An offline request for which nothing is idle."""


class InlineVerdict(StrEnum):
    """Why a prompt is computed where it is decoded, or is not."""

    ONLY = "only"
    """No prefill instance could have it."""
    CHEAPER = "cheaper"
    DEARER = "dearer"
    TOO_LONG = "too_long"
    """More is left to compute than decode instances may."""
    STEPS = "steps"
    """Those that generate there would wait longer for a token than promised."""


class Inlining(NamedTuple):
    """What was compared: the score on a decode instance and with a hand-over; 0 where there was none."""

    verdict: InlineVerdict
    here_s: float = 0.0
    apart_s: float = 0.0


class AdmissionMode(StrEnum):
    """Which requests are refused at arrival; `overload` says how each is judged."""

    NONE = "none"
    TTFT_TBT = "ttft_tbt"
    BASELINE = "baseline"
    EARLY = "early"
    PREDICTED = "predicted"
    LEARNED = "learned"


class PrefillCost(NamedTuple):
    """Time to compute a prompt of n tokens whose first p are cached: a + b(n-p) + c(n^2-p^2) + d p.

    The form of the Mooncake papers' polynomial regression; c is attention, d the cost of bringing cached KV
    into place.
    """

    a: float
    b: float
    c: float
    d: float

    def seconds(self, n: int, p: int) -> float:
        """Seconds for the prompt; at least one token is always computed."""
        p = max(0, min(p, n - 1))
        return self.a + self.b * (n - p) + self.c * (float(n) * n - float(p) * p) + self.d * p


class TransferCost(NamedTuple):
    """Time to bring KV from elsewhere into an engine: a fixed part and a rate."""

    latency_s: float
    tokens_per_s: float

    def seconds(self, tokens: int) -> float:
        """Seconds for so many tokens; nothing costs nothing."""
        return self.latency_s + tokens / self.tokens_per_s if tokens > 0 else 0.0


class DecodeCost(NamedTuple):
    """Time of one decode step: base + per sequence + per token of KV in the batch."""

    base_s: float
    per_sequence_s: float
    per_token_s: float

    def tbt_s(self, sequences: float, kv_tokens: float) -> float:
        """Seconds between two tokens of each sequence of the batch."""
        return self.base_s + self.per_sequence_s * sequences + self.per_token_s * kv_tokens


class PrefixSource(NamedTuple):
    """Where leading tokens of the prompt can be read from."""

    row: int  # the instance that holds them, NO_ROW for the store nodes
    tokens: int
    tokens_per_s: float = float("inf")  # what one more reader would get
    ssd_tokens_per_s: float = float("inf")  # what one more reader would get of its disks
    on_host: Ints | None = None
    """Of the tokens behind those that each row holds itself: how many the memory of the row's own host has. None: of no
    row."""
    on_ssd: Ints | None = None
    """The same: how many lie on disks alone."""
    held: Ints | None = None
    """The same: how many lie with holders whose own rate is known, in memory of other hosts or on disks."""
    held_s: Floats | None = None
    """Seconds in which each row reads those, at the rates of their holders."""


class Awaited(NamedTuple):
    """Leading tokens that another request is computing on `row`; they are there in `ready_in_s`."""

    tokens: int
    ready_in_s: float
    row: int
    decision_id: str = ""
    pool: bool = True


@dataclass(frozen=True, slots=True)
class Request:
    """What is to be scheduled."""

    prompt_tokens: int
    local: Ints  # leading tokens that each row of the fleet holds itself
    cacheable_tokens: int = 0  # tokens of complete blocks
    sources: tuple[PrefixSource, ...] = ()
    awaited: tuple[Awaited, ...] = ()
    group: int = 0  # passport group under which the keys were made
    sequences: int = 1
    output_tokens: float = 128.0
    ttft_slo_s: float = 30.0
    tbt_slo_s: float = 1.0
    ttft_strict: bool = False  # the caller named the promise itself, so it is kept even on idle instances
    tbt_strict: bool = False  # the same for the time between tokens
    no_prefill: bool = False
    exclude: frozenset[int] = frozenset()
    keep_decode: int = NO_ROW  # the row that already has the decode leg
    priority: int = 0
    offline: bool = False
    tenant_share: float = 1.0  # the tenant's recent uncached tokens over its fair share
    lateness: float = 0.0  # share by which first tokens that wait may come later than predicted, as learnt
    demand: Iterable[tuple[float, ...]] = ()
    """Seconds of computing asked for lately, by all up to each bucket of cost, for each memory (`crowding`)."""
    number: int = 0  # running number (round robin)
    affinity: tuple[int, ...] = ()  # numbers that name the prefix after 1, 2, 4, 8, ... blocks (DualMap)

    @property
    def kv_tokens(self) -> float:
        """KV that the request will take where it is decoded, at its end."""
        return self.prompt_tokens + self.sequences * self.output_tokens


@dataclass(frozen=True, slots=True)
class Rules:
    """Settings of all policies. They are the same for every scenario and cluster."""

    admission: AdmissionMode = AdmissionMode.LEARNED
    threshold: float = 1.5
    """Algorithm 1's balancing threshold."""
    inline_tokens_max: int = 4096
    """The most that a decode instance may compute itself while prefill instances are there, whatever the price."""
    work_weight: float = 0.1
    """Seconds of delay that one second of computing saved is worth, since the next requests queue for it."""
    queue_weight: float = 0.3
    """What `work_weight` grows by for each prompt that queues already."""
    waits: bool = True
    """Whether a prompt may wait for blocks that another instance computes."""
    pipelines: bool = False
    """Whether several instances may compute one prompt together. No engine does: it is for the published figures and
    plans. Stages inside of one engine are a matter of its own prices."""
    pipeline_worth_s: float = 2.0
    """A prompt that one instance computes sooner than this is not divided."""
    patience: float = 2.0
    """An idle instance's time, times this, is the least limit of a promise that no caller asked for."""
    priority_step: float = 0.25
    offline_share: float = 0.8
    """How full of an instance, and of the TBT promise, an offline request may make it; 0: none is taken."""
    retry_after_min_s: float = 0.25
    retry_after_max_s: float = 60.0
    overlap_weight: float = 1.0
    """Dynamo's weight of computing."""
    affinity_depth: int = 1
    """Which of a request's `affinity` hashes DualMap takes (1: the one of two blocks)."""
    holds: bool = False
    """Decode instances let a newcomer wait while their steps would be longer than promised. No engine does, they take
    in whatever has room: it is for the published figures."""


@dataclass(frozen=True, slots=True)
class Choice:
    """The outcome. Rows are those of the fleet that was chosen from."""

    admitted: bool
    reason: Reason
    prefill: int = NO_ROW  # NO_ROW when the decode instance computes the prompt itself
    decode: int = NO_ROW
    branch: Branch = Branch.LOCAL
    prefix_tokens: int = 0
    fetch_tokens: int = 0
    source_row: int = NO_ROW  # where `fetch_tokens` are read from
    awaited: Awaited | None = None
    members: tuple[int, ...] = ()
    """Rows of the pipeline that computes the prompt together, in order of the stages; empty for one instance alone."""
    chunk_tokens: int = 0
    ttft_s: float = 0.0  # all of it until the first token
    queue_s: float = 0.0  # computing in front
    ready_s: float = 0.0  # when the prefix is there
    compute_s: float = 0.0  # the prefill itself
    handover_s: float = 0.0
    wait_s: float = 0.0  # for a place in the decode batch
    tbt_s: float = 0.0
    retry_after_s: float = 0.0
    ttft_limit_s: float = 0.0  # what `ttft_s` was too long for, 0 when that is not why it was refused
    scores: Floats | None = field(default=None, compare=False)
    """What was compared for the prompt, for each row; infinite for rows that were no candidates."""
    decode_scores: Floats | None = field(default=None, compare=False)
    """The same for the answer."""
    inline_scores: Floats | None = field(default=None, compare=False)
    """The same for prompt and answer on one instance."""
    inlining: Inlining | None = None  # why the prompt has a prefill leg, or none
    invalid_costs: int = 0  # how many were not numbers

    @property
    def prefiller_row(self) -> int:
        """The row that computes the prompt (the first of a pipeline)."""
        return self.prefill if self.prefill != NO_ROW else self.decode

    @property
    def waiting_s(self) -> float:
        """What of `ttft_s` is waiting for others."""
        return self.queue_s + self.wait_s

    @property
    def total_s(self) -> float:
        """When the prompt's KV is there."""
        return self.ttft_s - self.wait_s - self.handover_s
