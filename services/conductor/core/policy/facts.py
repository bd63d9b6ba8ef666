"""What the policies look at: cost models, an instance at one moment, a request, and the choices made of them.

All times are seconds, all lengths tokens. Values are plain and frozen, so that a decision can be recorded,
replayed and simulated exactly.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

ROLE_PREFILL, ROLE_DECODE, ROLE_BOTH = "prefill", "decode", "both"


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
        return self.a + self.b * (n - p) + self.c * (n * n - p * p) + self.d * p


class TransferCost(NamedTuple):
    """Time to bring KV from the pool into an engine: a fixed part and a rate."""

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


class InstanceFacts(NamedTuple):
    """One instance as a decision sees it.

    group: instances of one group can read each other's blocks (equal passports). queue_s: prefill work that
    comes first. kv_used_tokens and sequences include what was sent there and has not arrived yet. turnover_s:
    how long a sequence stays in the batch.
    """

    instance_id: str
    role: str
    ready: bool
    prefill: PrefillCost
    transfer: TransferCost
    decode: DecodeCost
    group: int = 0
    pool: bool = True
    local_tokens: int = 0
    queue_s: float = 0.0
    sequences: float = 0.0
    sequences_max: int = 0
    kv_used_tokens: float = 0.0
    kv_capacity_tokens: int = 0
    turnover_s: float = 10.0


class Awaited(NamedTuple):
    """Leading tokens that another request is computing on `instance_id` and that are there in
    `ready_in_s`."""

    tokens: int
    ready_in_s: float
    instance_id: str
    decision_id: str = ""
    pool: bool = True


@dataclass(frozen=True, slots=True)
class Request:
    """What is to be scheduled. cacheable_tokens: tokens of complete blocks; pool_tokens: leading ones in the
    pool.

    group: passport group under which the keys were made. keep_decode: the instance that already has the
    decode leg. ttft_strict and tbt_strict: the caller named the promise itself, so it is kept even on idle
    instances.
    """

    prompt_tokens: int
    cacheable_tokens: int = 0
    pool_tokens: int = 0
    group: int = 0
    awaited: tuple[Awaited, ...] = ()
    sequences: int = 1
    output_tokens: int = 128
    ttft_slo_s: float = 30.0
    tbt_slo_s: float = 1.0
    ttft_strict: bool = False
    tbt_strict: bool = False
    no_prefill: bool = False
    exclude: frozenset[str] = frozenset()
    keep_decode: str = ""
    priority: int = 0


@dataclass(frozen=True, slots=True)
class Rules:
    """Settings of the policies.

    inline_tokens_max: what a decode instance may compute itself while prefill instances are there.
    """

    admission: bool = True
    inline_tokens_max: int = 256
    retry_after_min_s: float = 0.25
    retry_after_max_s: float = 60.0


class Branch(NamedTuple):
    """One way for one instance to come by the prompt's KV. `kind` is local, fetch or wait.

    total_s: time until the KV is there. score_s: what is compared, total_s and a share of the computing.
    """

    kind: str
    prefix_tokens: int
    fetch_tokens: int
    ready_s: float
    compute_s: float
    total_s: float
    score_s: float
    awaited: Awaited | None = None


class PrefillOption(NamedTuple):
    """A priced prefill candidate: its branches, the cheapest of them, and the queue in front of it."""

    facts: InstanceFacts
    branches: tuple[Branch, ...]
    best: Branch


class DecodeOption(NamedTuple):
    """A priced decode candidate at the time when the prompt's KV is there."""

    facts: InstanceFacts
    tbt_s: float
    wait_s: float
    handover_s: float
    score_s: float


@dataclass(frozen=True, slots=True)
class Choice:
    """The outcome. `prefill` is None when the decode instance computes the prompt itself (`inline` is its
    branch then).

    reason: admitted, ttft, tbt, capacity or no_instance. queue_s: how much of ttft_s is waiting.
    """

    admitted: bool
    reason: str
    prefill: PrefillOption | None = None
    decode: DecodeOption | None = None
    inline: PrefillOption | None = None
    ttft_s: float = 0.0
    queue_s: float = 0.0
    retry_after_s: float = 0.0
    prefill_options: tuple[PrefillOption, ...] = ()
    decode_options: tuple[DecodeOption, ...] = ()
    inline_options: tuple[PrefillOption, ...] = field(default=())

    @property
    def branch(self) -> Branch | None:
        """How the prompt's KV comes about; None for a refusal without candidates."""
        option = self.prefill or self.inline
        return option.best if option is not None else None
