"""Cost models of transfers and decode steps that learn from what was observed, and the priors of all of them.

A factor on a prior is followed in the logarithm with clipped steps: one odd observation (a compile, a stall) moves
little, while a lasting change of speed is followed within a few steps. Prefills have a model of their own
(`PrefillLearner`).
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from enum import StrEnum

from mooncache.client.results import BELOW_MEMORY
from mooncache.conductor.core.policy.types import DecodeCost, PrefillCost, TransferCost
from mooncache.kvcache.leg_hint import LoadedFrom

# LLaMA3-70B on 8 A800, fitted to Mooncake (FAST'25), figure 14; seconds and tokens.
PREFILL_PRIOR = PrefillCost(0.0666, 1.1003e-4, 7.386e-10, 2.618e-6)
# A small model on a CPU: what the `hf` engine is mostly used with.
PREFILL_PRIOR_HF = PrefillCost(0.02, 3e-4, 3e-9, 1e-6)
# By the name of an engine; others, those of users too, begin with PREFILL_PRIOR.
_PREFILL_PRIORS = {"hf": PREFILL_PRIOR_HF}
DECODE_PRIOR = DecodeCost(0.0263, 0.00021, 3.4e-8)
TRANSFER_PRIOR_BYTES_PER_S = 1e9
DISK_PRIOR_BYTES_PER_S = 5e8
TRANSFER_LATENCY_S = 0.005
CHUNK_TOKENS = 2048  # that an engine with stages computes at a time
KV_BYTES_PER_TOKEN_UNKNOWN = 100_000
_SECONDS_MAX = 3600.0
ONE_SOURCE_SHARE = 0.8  # of a load's blocks, from which on its time is that of their source


@dataclass(slots=True)
class Follower:
    """A positive value followed in the logarithm: a step changes it by `reach` at most."""

    value: float
    weight: float = 0.2
    reach: float = 4.0
    count: int = 0

    def observe(self, seen: float) -> bool:
        """Take in one observation; return False for an impossible one."""
        ratio = seen / self.value
        if not 0 < ratio < math.inf:
            return False
        weight = max(self.weight, 1.0 / (self.count + 1))
        limit = math.log(self.reach) if self.count else 30.0
        step = max(-limit, min(limit, math.log(ratio)))
        self.value = min(1e300, max(1e-300, self.value * math.exp(weight * step)))
        self.count += 1
        return True


class FadingMean:
    """The mean of about the last `memory` observations; `value` is the prior before the first one."""

    __slots__ = ("_memory", "count", "value")

    def __init__(self, prior: float, memory: int = 200) -> None:
        self.value, self.count, self._memory = prior, 0, memory

    def observe(self, seen: float) -> bool:
        """Take in one observation; return False for an impossible one."""
        if not 0 <= seen <= _SECONDS_MAX:
            return False
        self.count = min(self.count + 1, self._memory)
        self.value += (seen - self.value) / self.count
        return True


def prefill_prior(engine: str, stages: int = 1) -> PrefillCost:
    """The prior of an engine without observations.

    With k stages the chunks of a prompt follow each other: each is on a stage for a k-th of its time, and the last one
    ends k - 1 of these after it has left the first. So a long prompt takes a k-th, and one of a single chunk no less.
    """
    whole = _PREFILL_PRIORS.get(engine, PREFILL_PRIOR)
    behind_s = whole.b * CHUNK_TOKENS * (stages - 1) / stages
    return PrefillCost(whole.a + behind_s, whole.b / stages, whole.c / stages, whole.d / stages)


class LoadSource(StrEnum):
    """Where most of what an instance loaded came from."""

    REMOTE = "remote"
    """From memory of store nodes on other hosts, or on hosts that were not named."""
    HOST = "host"
    """From memory of its own host."""
    SSD = "ssd"
    """From disks."""
    HANDOVER = "handover"
    """What a prefill leg had handed over."""


def load_source(places: Sequence[LoadedFrom], local_nodes: Collection[str]) -> LoadSource | None:
    """Where nearly all of the blocks came from; None: from several kinds of places.

    Args:
        local_nodes: store nodes on the host of the instance.
    """
    blocks = dict.fromkeys(LoadSource, 0)
    for place in places:
        if place.tier in BELOW_MEMORY:
            blocks[LoadSource.SSD] += place.blocks
        else:
            blocks[LoadSource.HOST if place.store_node in local_nodes else LoadSource.REMOTE] += place.blocks
    most = max(blocks, key=lambda each: blocks[each])
    total = sum(blocks.values())
    return LoadSource.REMOTE if not total else most if blocks[most] >= ONE_SOURCE_SHARE * total else None


class TransferLearner:
    """Bytes per second from the pool into an engine."""

    def __init__(self, prior_bytes_per_s: float = TRANSFER_PRIOR_BYTES_PER_S) -> None:
        self.bytes_per_s = Follower(prior_bytes_per_s)

    def observe(self, loaded_bytes: float, seconds: float) -> bool:
        """Take in one load; small ones say nothing about the rate."""
        if not (loaded_bytes >= 65536 and 1e-5 <= seconds <= _SECONDS_MAX):
            return False
        rate = loaded_bytes / max(1e-5, seconds - min(TRANSFER_LATENCY_S, seconds / 2))
        return self.bytes_per_s.observe(min(1e13, rate))

    def cost(self, kv_bytes_per_token: int) -> TransferCost:
        """The model for an engine whose tokens have so many bytes."""
        per_token = kv_bytes_per_token or KV_BYTES_PER_TOKEN_UNKNOWN
        return TransferCost(TRANSFER_LATENCY_S, self.bytes_per_s.value / per_token)


class DecodeLearner:
    """Step time of one instance: the prior times a factor that follows reported TBT."""

    def __init__(self) -> None:
        self.factor = Follower(1.0)
        self.cost = DECODE_PRIOR

    def observe(self, sequences: float, kv_tokens: float, tbt_s: float) -> bool:
        """Take in a reported TBT at a reported batch."""
        if not 0 < tbt_s <= _SECONDS_MAX:
            return False
        taken = self.factor.observe(tbt_s / DECODE_PRIOR.tbt_s(sequences, kv_tokens))
        factor = min(1e6, max(1e-6, self.factor.value))
        prior = DECODE_PRIOR
        self.cost = DecodeCost(
            prior.base_s * factor, prior.per_sequence_s * factor, prior.per_token_s * factor
        )
        return taken
